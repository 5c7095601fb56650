// Before anything is drawn: the theme that was chosen here, if one was. Without a choice the system's own is taken.
(function () {
  "use strict";
  try {
    const chosen = localStorage.getItem("avow-theme");
    if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
  } catch (_) { /* storage may be forbidden */ }
  document.documentElement.classList.add("js");
})();
