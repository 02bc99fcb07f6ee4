"use strict";
// Draws the figures of the page and lets the reader choose what they show. No network, no storage.

const figures = JSON.parse(document.getElementById("figures").textContent);
const drawn = new Map(); // id -> element
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function theme() {
  const axis = { gridcolor: css("--line"), linecolor: css("--line"), zeroline: false, automargin: true };
  return {
    font: { family: css("--sans"), size: 13, color: css("--ink") },
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    hoverlabel: {
      bgcolor: css("--raised"), bordercolor: css("--line"), align: "left", font: { color: css("--ink"), size: 13 },
    },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: css("--soft"), activecolor: css("--ink") },
    axis,
  };
}

function layoutOf(own) {
  const { axis, ...rest } = theme();
  const { xaxis, yaxis, ...mine } = own;
  return {
    ...rest,
    margin: { l: 8, r: 8, t: 26, b: 8 }, // of maps
    showlegend: false,
    hovermode: "closest",
    dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",
    ...mine,
    xaxis: { ...axis, tickformat: ",d", ...xaxis },
    yaxis: { ...axis, ...yaxis },
  };
}

function choices(section) {
  const on = (name) => section.querySelector(`input[name="${name}"]`)?.checked ?? true;
  const hidden = new Set();
  for (const button of section.querySelectorAll('.legend button[aria-pressed="false"]')) {
    hidden.add(Number(button.dataset.curve));
  }
  return { control: on("control"), bands: on("bands"), hidden };
}

function visible(trace, { control, bands, hidden }) {
  const { curve, kind, of } = trace.meta ?? {};
  if (hidden.has(curve)) return false;
  if ((kind === "control" || of === "control") && !control) return false;
  return kind !== "band" || bands;
}

const hasBars = (trace) => ["error_x", "error_y"].filter((axis) => trace[axis]?.array);

function draw(element) {
  const { data, layout } = figures[element.id];
  const chosen = choices(element.closest("section"));
  for (const trace of data) {
    trace.visible = visible(trace, chosen);
    for (const axis of hasBars(trace)) trace[axis].visible = chosen.bands;
  }
  const options = {
    responsive: true, displaylogo: false, showLink: false, showSendToCloud: false, plotlyServerURL: "",
    modeBarButtonsToRemove: ["zoom2d", "pan2d", "select2d", "lasso2d", "zoomIn2d", "zoomOut2d", "autoScale2d"],
  };
  drawn.set(element.id, element);
  return Plotly.newPlot(element, data, layoutOf(layout), options);
}

function update(section) {
  const chosen = choices(section);
  const scale = section.querySelector('input[name="log"]')?.checked ? "log" : "linear";
  for (const element of section.querySelectorAll(".figure")) {
    if (!drawn.has(element.id) || element.dataset.kind === "map") continue;
    const changes = { visible: element.data.map((trace) => visible(trace, chosen)) };
    for (const axis of ["error_x", "error_y"]) {
      changes[`${axis}.visible`] = element.data.map((trace) => chosen.bands && hasBars(trace).includes(axis));
    }
    const hasLengths = element.dataset.kind === "lines" && section.querySelector('input[name="log"]');
    Plotly.update(element, changes, hasLengths ? { "xaxis.type": scale, "xaxis.autorange": true } : {});
  }
}

for (const section of document.querySelectorAll("section")) {
  for (const input of section.querySelectorAll(".choices input")) input.addEventListener("change", () => update(section));
  for (const button of section.querySelectorAll(".legend button")) {
    button.addEventListener("click", () => {
      button.setAttribute("aria-pressed", String(button.getAttribute("aria-pressed") === "false"));
      update(section);
    });
  }
}

// A column header sorts the rows of its table: up, down, and then as they were.
const NUMBER = /^([<>]?) ?([-−+]?)(\d[\d,]*(?:\.\d+)?|∞)(?: ([KMG]iB))?/;
const BYTES = { KiB: 2 ** 10, MiB: 2 ** 20, GiB: 2 ** 30 };
const WHOLE = /^[\d,.]+$/;

// "0.52 [0.4, 0.6]" is 0.52, and ">895" comes after 895; a cell that fills several columns is empty
function valueOf(cell) {
  if (!cell || cell.colSpan > 1) return { text: "" };
  const copy = cell.cloneNode(true);
  for (const mark of copy.querySelectorAll("[aria-hidden]")) mark.remove();
  const text = copy.textContent.trim();
  const found = cell.scope === "row" && !WHOLE.test(text) ? null : NUMBER.exec(text);
  if (!found) return { text };
  const [, bound, sign, digits, unit] = found;
  const size = (digits === "∞" ? Infinity : Number(digits.replaceAll(",", ""))) * (BYTES[unit] ?? 1);
  return { text, number: sign === "-" || sign === "−" ? -size : size, beyond: { "<": -1, ">": 1 }[bound] ?? 0 };
}

function compare(a, b, byNumber) {
  if (!byNumber) return a.text.localeCompare(b.text, "en", { numeric: true });
  return a.number === b.number ? a.beyond - b.beyond : a.number - b.number;
}

function sorted(rows, column, direction) {
  const values = new Map(rows.map((row) => [row, valueOf(row.cells[column])]));
  const byNumber = [...values.values()].some(({ number }) => number !== undefined);
  const missing = ({ text, number }) => (byNumber ? number === undefined : ["", "–", "-"].includes(text));
  return rows.toSorted((one, other) => {
    const [a, b] = [values.get(one), values.get(other)];
    return missing(a) - missing(b) || (missing(a) ? 0 : direction * compare(a, b, byNumber));
  });
}

for (const table of document.querySelectorAll(".lengths")) {
  const body = table.tBodies[0];
  const rows = [...body.rows]; // in the order of the page
  if (rows.length < 2) continue;
  for (const [column, head] of [...table.tHead.rows[0].cells].entries()) {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const next = { ascending: "descending", descending: "" }[head.getAttribute("aria-sort")] ?? "ascending";
      for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
      if (next) head.setAttribute("aria-sort", next);
      body.append(...(next ? sorted(rows, column, next === "ascending" ? 1 : -1) : rows));
    });
  }
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  for (const element of drawn.values()) Plotly.react(element, element.data, layoutOf(figures[element.id].layout));
});

// a table that is wider than the page can be scrolled with the keyboard
const widths = new ResizeObserver((entries) => {
  for (const { target } of entries) target.tabIndex = target.scrollWidth > target.clientWidth ? 0 : -1;
});
for (const table of document.querySelectorAll(".wide")) widths.observe(table);

// what is far below waits until the reader comes near, or prints
const near = new IntersectionObserver((entries) => {
  for (const { isIntersecting, target } of entries) {
    if (!isIntersecting) continue;
    near.unobserve(target);
    draw(target);
  }
}, { rootMargin: "800px" });
addEventListener("beforeprint", () => {
  for (const element of document.querySelectorAll(".figure")) if (!drawn.has(element.id)) draw(element);
});

const all = [...document.querySelectorAll(".figure")];
Promise.all(all.slice(0, 2).map(draw)).then(() => {
  for (const element of all.slice(2)) near.observe(element);
  document.documentElement.dataset.drawn = String(Math.round(performance.now()));
});
