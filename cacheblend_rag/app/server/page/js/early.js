// Runs before the page is drawn, so that a chosen theme never flashes as the other one.
try {
  const theme = localStorage.getItem("cacheblend-rag/theme");
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch {
  // Storage that cannot be read leaves the system's theme.
}
