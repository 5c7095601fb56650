// What pages need beyond links and forms. All content comes escaped from the server; nothing here makes HTML of data.
(function () {
  "use strict";
  const $ = (selector, within) => (within || document).querySelector(selector);
  const all = (selector, within) => Array.from((within || document).querySelectorAll(selector));

  // The theme: the system's own, unless one is chosen.
  function showTheme() {
    const chosen = document.documentElement.dataset.theme || "auto";
    all("[data-set-theme]").forEach((b) => b.setAttribute("aria-pressed", String(b.dataset.setTheme === chosen)));
  }
  function setTheme(name) {
    if (name === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = name;
    try { name === "auto" ? localStorage.removeItem("avow-theme") : localStorage.setItem("avow-theme", name); } catch (_) {}
    showTheme();
    charts.forEach((chart) => chart.redraw());
  }

  // Charts
  const charts = new Map();
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const clock = (at) => new Date(at * 1000).toISOString().slice(11, 19);
  function makeChart(box, series) {
    const axis = () => ({ stroke: colour("--faint"), grid: { stroke: colour("--line-soft") }, ticks: { stroke: colour("--line") } });
    const options = (width) => ({
      width, height: 176, padding: [12, 36, 0, 0], legend: { show: true }, cursor: { points: { size: 6 } },
      scales: { y: { range: (_, low, high) => [0, Math.max(high * 1.1, 1)] } },
      axes: [Object.assign(axis(), { space: 74, size: 30, values: (_, ticks) => ticks.map(clock) }), Object.assign(axis(), { size: 62, values: (_, ticks) => ticks.map((v) => v.toLocaleString("en")) })],
      series: [
        { value: (_, at) => (at == null ? "–" : clock(at) + "Z") },
        { label: box.dataset.label, stroke: () => colour("--claimed"), width: 1.6, fill: () => colour("--accent-soft"),
          value: (_, v) => (v == null ? "–" : v.toLocaleString("en")), points: { show: series.at.length < 40 } },
      ],
    });
    let plot = null, now = series;
    const redraw = () => {
      if (plot) plot.destroy();
      box.textContent = "";
      if (now.at.length < 2) {
        const none = document.createElement("p");
        none.className = "none";
        none.textContent = box.dataset.none || "not enough seen yet";
        box.append(none);
        plot = null;
        return;
      }
      plot = new uPlot(options(box.clientWidth), [now.at, now.values], box);
    };
    redraw();
    return { redraw, set: (next) => { now = next; plot && next.at.length > 1 ? plot.setData([next.at, next.values]) : redraw(); } };
  }
  async function drawCharts() {
    const boxes = all("[data-chart]");
    if (!boxes.length || !window.uPlot || document.hidden) return;
    const answer = await fetch(boxes[0].dataset.src).catch(() => null);
    if (!answer || !answer.ok) return;
    const found = await answer.json();
    boxes.forEach((box) => {
      const series = found[box.dataset.chart];
      if (charts.has(box)) charts.get(box).set(series);
      else charts.set(box, makeChart(box, series));
    });
  }

  // What is shown is copied. Without TLS, and not on the loopback address, a browser has no clipboard for pages.
  async function copied(part) {
    const from = part.matches("pre") ? part : $("pre", part);
    if (navigator.clipboard) return navigator.clipboard.writeText(from.textContent);
    getSelection().selectAllChildren(from);
    if (!document.execCommand("copy")) throw new Error("not allowed");
  }

  // Tabs of one value: JSON or text, raw, hex
  function chooseTab(button) {
    const box = button.closest("[data-tabs]");
    all("button[data-for]", box).forEach((b) => b.setAttribute("aria-selected", String(b === button)));
    all("[data-tab]", box).forEach((part) => part.classList.toggle("hidden", part.dataset.tab !== button.dataset.for));
  }

  // The explained page: which moment is shown
  function showFrame(number) {
    const frames = all(".frame");
    if (!frames.length) return;
    const at = Math.min(Math.max(number, 1), frames.length);
    frames.forEach((f) => f.classList.toggle("now", Number(f.dataset.frame) === at));
    all(".story li").forEach((li) => li.classList.toggle("now", Number(li.dataset.frame) === at));
    const slider = $("#slider");
    if (slider) slider.value = String(at);
  }
  const frameNow = () => Number(($(".frame.now") || { dataset: { frame: 1 } }).dataset.frame);
  let playing = null;
  function play() {
    const button = $("#play");
    if (playing) { clearInterval(playing); playing = null; if (button) button.textContent = "Play"; return; }
    const last = all(".frame").length;
    if (frameNow() >= last) showFrame(1);
    if (button) button.textContent = "Pause";
    playing = setInterval(() => { if (frameNow() >= last) play(); else showFrame(frameNow() + 1); }, 900);
  }

  // A live part takes a connection, and a browser has six for one host: a tab that is not seen gives its own back, and
  // takes up where it was when it is seen again. What htmx is given looks like an EventSource.
  const lives = new Set();
  function live(address) {
    const heard = [];
    let source = null, at = "", over = false;
    const made = {
      onopen: null, onerror: null,
      get readyState() { return over ? EventSource.CLOSED : source ? source.readyState : EventSource.CONNECTING; },
      addEventListener(name, listener) { heard.push([name, listener]); if (source) source.addEventListener(name, listener); },
      removeEventListener(name, listener) { if (source) source.removeEventListener(name, listener); },
      close() { over = true; lives.delete(made); made.pause(); },
      pause() { if (source) source.close(); source = null; },
      open() {
        if (source || over) return;
        const place = new URL(address, location.href);
        if (at) place.searchParams.set("onwards", at);
        source = new EventSource(place);
        source.onopen = (event) => made.onopen && made.onopen(event);
        source.onerror = (event) => {
          if (source.readyState === EventSource.CLOSED) made.close(); // for good: htmx makes another
          if (made.onerror) made.onerror(event);
        };
        const placed = (event) => { at = event.lastEventId; };
        [["place", placed], ["rows", placed], ...heard].forEach(([name, listener]) => source.addEventListener(name, listener));
      },
    };
    lives.add(made);
    if (!document.hidden) made.open();
    return made;
  }
  htmx.createEventSource = live;
  document.addEventListener("visibilitychange", () => {
    lives.forEach((one) => (document.hidden ? one.pause() : one.open()));
    drawCharts();
  });
  document.addEventListener("htmx:sseClose", (event) => {
    if (event.detail.type !== "message") return;
    all(".pill.running", event.target).forEach((pill) => { pill.className = "pill"; pill.textContent = "ended"; });
  });

  // A tail keeps no more than it can show
  const TAIL_MAX = 200;
  document.addEventListener("htmx:afterSwap", (event) => {
    if (event.target.id !== "tail-rows") return;
    all("tr", event.target).slice(TAIL_MAX).forEach((row) => row.remove());
  });

  document.addEventListener("click", (event) => {
    const target = event.target.closest("[data-set-theme],[data-for],[data-copy],[data-step],[data-goto],#play,[data-close]");
    if (!target) return;
    if (target.dataset.setTheme) setTheme(target.dataset.setTheme);
    else if (target.dataset.for) chooseTab(target);
    else if (target.dataset.copy) {
      copied($("[data-tab]:not(.hidden)", target.closest("[data-tabs]"))).then(() => "Copied", () => "Selected: press Ctrl-C").then((said) => {
        target.textContent = said;
        setTimeout(() => { target.textContent = "Copy"; }, 1500);
      });
    } else if (target.dataset.step) showFrame(frameNow() + Number(target.dataset.step));
    else if (target.dataset.goto) { event.preventDefault(); showFrame(Number(target.dataset.goto)); }
    else if (target.id === "play") play();
    else if (target.dataset.close) target.closest("dialog").close();
  });
  document.addEventListener("input", (event) => { if (event.target.id === "slider") showFrame(Number(event.target.value)); });
  // A place: what is typed chooses its word, and another word takes away what was typed.
  document.addEventListener("input", ({ target }) => {
    const { typed } = target.dataset;
    const place = (typed && target.value) || target.matches("[data-place]") ? $("[data-place]", target.form) : null;
    if (!place) return;
    if (typed) place.value = typed;
    all("[data-typed]", target.form).forEach((box) => { if (box.dataset.typed !== place.value) box.value = ""; });
  });
  // A choice that takes effect at once, such as how a page begins.
  document.addEventListener("change", (event) => { if (event.target.dataset.submit) event.target.form.requestSubmit(); });

  // Keys: / searches, ? helps, g and a letter goes to a page; arrows step through the explained page.
  let pending = 0;
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (/^(INPUT|TEXTAREA|SELECT)$/.test(event.target.tagName)) {
      if (event.key === "Escape") event.target.blur();
      return;
    }
    if (Date.now() - pending < 1200) {
      pending = 0;
      const link = $(`.menu a[data-key="${CSS.escape(event.key)}"]`);
      if (link) { event.preventDefault(); link.click(); }
      return;
    }
    if (event.key === "g") pending = Date.now();
    else if (event.key === "/") { const box = $("[data-search]"); if (box) { event.preventDefault(); box.focus(); box.select(); } }
    else if (event.key === "?") { const help = $("#help"); if (help) help.showModal(); }
    else if (event.key === "ArrowRight" && $(".frame")) showFrame(frameNow() + 1);
    else if (event.key === "ArrowLeft" && $(".frame")) showFrame(frameNow() - 1);
    else if (event.key === " " && $(".frame") && event.target.tagName !== "BUTTON") { event.preventDefault(); play(); }
  });

  document.addEventListener("DOMContentLoaded", () => {
    showTheme();
    drawCharts();
    if ($("[data-chart]")) setInterval(drawCharts, 5000);
    const start = $("[data-frames]");
    if (start) showFrame(Number(start.dataset.frames));
  });
  let resized = 0;
  window.addEventListener("resize", () => { clearTimeout(resized); resized = setTimeout(() => charts.forEach((c) => c.redraw()), 150); });
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => charts.forEach((c) => c.redraw()));
})();
