// Runs before the page is drawn, so that a chosen theme never flashes as the other one.
(() => {
  try {
    const saved = JSON.parse(localStorage.getItem("cacheblend-rag/1") || "{}");
    if (saved.theme === "light" || saved.theme === "dark") document.documentElement.dataset.theme = saved.theme;
  } catch {
    // Storage that cannot be read leaves the system's theme.
  }
})();
