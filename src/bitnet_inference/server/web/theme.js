// Runs before the first paint: the chosen colours, if somebody chose. No module, because modules come later.
"use strict";
(() => {
  const root = document.documentElement, KEY = "bitnet.theme", CHOICES = ["auto", "light", "dark"];
  let chosen = "auto";
  try {
    chosen = localStorage.getItem(KEY) ?? "auto";
  } catch {
    // A browser that keeps nothing: the system's colours.
  }
  const show = (choice) => {
    root.dataset.theme = CHOICES.includes(choice) ? choice : "auto";
  };
  show(chosen);
  document.addEventListener("click", (event) => {
    const button = event.target instanceof Element && event.target.closest("[data-switch-theme]");
    if (!button) return;
    const next = CHOICES[(CHOICES.indexOf(root.dataset.theme) + 1) % CHOICES.length];
    show(next);
    button.setAttribute("aria-label", `Colours: ${next}`);
    button.title = `Colours: ${next}`;
    try {
      localStorage.setItem(KEY, next);
    } catch {
      // It holds until the page is left.
    }
  });
})();
