// Runs before anything is drawn, so that no page flashes in the other theme.
"use strict";
{
  const theme = localStorage.getItem("theme");
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
}
