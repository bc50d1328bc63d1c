// Before anything is drawn, so that the page does not flash in the other colours.
try { const kept = localStorage.getItem("paceline-theme"); if (kept) document.documentElement.dataset.theme = kept; } catch { /* without storage the system's choice holds */ }
