"use strict";
// What the theme's scripts leave out for screen readers and keyboards, once they have run.

addEventListener("load", () => {
  document.querySelector(".md-search")?.setAttribute("aria-label", "Search");
  for (const buttons of document.querySelectorAll(".md-code__nav")) buttons.setAttribute("role", "group");
  // a table or code that is wider than the page can be scrolled with the keyboard
  const widths = new ResizeObserver((entries) => {
    for (const { target } of entries) target.tabIndex = target.scrollWidth > target.clientWidth ? 0 : -1;
  });
  for (const wide of document.querySelectorAll("pre > code, .md-typeset__scrollwrap")) widths.observe(wide);
});
