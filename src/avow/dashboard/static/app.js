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
  function makeChart(box) {
    const canvas = document.createElement("canvas");
    box.replaceChildren(canvas);
    const axis = (format) => ({
      type: "linear", border: { color: () => colour("--line") }, grid: { color: () => colour("--line-soft") },
      ticks: { color: () => colour("--faint"), maxRotation: 0, includeBounds: false, autoSkipPadding: 24, callback: format },
    });
    const number = (value) => value.toLocaleString("en");
    const chart = new Chart(canvas, {
      type: "line",
      data: { datasets: [{
        data: [], borderColor: () => colour("--claimed"), borderWidth: 1.6, fill: true, backgroundColor: () => colour("--accent-soft"),
        pointRadius: ({ dataset }) => (dataset.data.length < 40 ? 2 : 0), pointBackgroundColor: () => colour("--claimed"),
      }] },
      options: {
        animation: false, maintainAspectRatio: false, parsing: false, interaction: { mode: "nearest", axis: "x", intersect: false },
        scales: { x: axis(clock), y: Object.assign(axis(number), { min: 0, suggestedMax: 1 }) },
        plugins: { legend: { display: false }, tooltip: {
          displayColors: false,
          callbacks: { title: ([point]) => clock(point.parsed.x) + "Z", label: (point) => box.dataset.label + ": " + number(point.parsed.y) },
        } },
      },
    });
    return {
      redraw: () => chart.update(),
      set: ({ at, values }) => {
        chart.data.datasets[0].data = at.map((x, i) => ({ x, y: values[i] }));
        chart.options.scales.x.min = at[0];
        chart.options.scales.x.max = at[at.length - 1];
        chart.update();
      },
    };
  }
  async function drawCharts() {
    const boxes = all("[data-chart]");
    if (!boxes.length || document.hidden) return;
    const answer = await fetch(boxes[0].dataset.src).catch(() => null);
    if (!answer || !answer.ok) return;
    const found = await answer.json();
    boxes.forEach((box) => {
      const series = found[box.dataset.chart];
      if (series.at.length < 2 && !charts.has(box)) return;
      if (!charts.has(box)) charts.set(box, makeChart(box));
      charts.get(box).set(series);
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

  // A live part takes a connection, and a browser has six for one host: a tab that is not seen closes its own, and
  // resumes where it was when it is seen again. An event "part" replaces what the part shows, "rows" go to the top of
  // its table, "over" ends it.
  const TAIL_MAX = 200;
  const RETRY_MAX_MS = 60000;
  const lives = new Map();
  function connect(box) {
    let source = null, last = "", timer = 0, retryMs = 1000;
    const close = () => { clearTimeout(timer); if (source) source.close(); source = null; };
    const end = () => { close(); lives.delete(box); };
    const on = (name, show) => source.addEventListener(name, (event) => {
      if (!box.isConnected) return end();
      last = event.lastEventId;
      show(event.data);
    });
    function open() {
      if (source) return;
      const address = new URL(box.dataset.live, location.href);
      if (last) address.searchParams.set("onwards", last);
      source = new EventSource(address);
      source.onopen = () => { retryMs = 1000; };
      source.onerror = () => { // the browser itself connects again, unless the server refused
        if (source.readyState !== EventSource.CLOSED) return;
        close();
        timer = setTimeout(open, retryMs);
        retryMs = Math.min(retryMs * 2, RETRY_MAX_MS);
      };
      on("place", () => {});
      on("part", (html) => htmx.swap(box, html, { swapStyle: "innerHTML" }));
      on("rows", (html) => {
        const rows = $("tbody", box);
        htmx.swap(rows, html, { swapStyle: "afterbegin" });
        all("tr", rows).slice(TAIL_MAX).forEach((row) => row.remove());
      });
      on("over", () => {
        end();
        all(".pill.running", box).forEach((pill) => { pill.className = "pill"; pill.textContent = "ended"; });
      });
    }
    if (!document.hidden) open();
    return { open, close, end };
  }
  function connectAll() {
    lives.forEach((live, box) => { if (!box.isConnected) live.end(); });
    all("[data-live]").forEach((box) => { if (!lives.has(box)) lives.set(box, connect(box)); });
  }
  document.addEventListener("htmx:load", connectAll); // the page, and whatever htmx adds to it
  document.addEventListener("visibilitychange", () => {
    lives.forEach((live) => (document.hidden ? live.close() : live.open()));
    drawCharts();
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
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => charts.forEach((c) => c.redraw()));
})();
