"use strict";
const tip = document.createElement("div");
tip.id = "tip"; tip.hidden = true; document.body.append(tip);
const SVG = "http://www.w3.org/2000/svg", LEFT = 46, RIGHT = 548, TOP = 10, BOTTOM = 196;
function place(event) {
  tip.hidden = false;
  const x = event.clientX + 16, y = event.clientY + 16, box = tip.getBoundingClientRect();
  tip.style.left = Math.max(4, x + box.width > innerWidth ? event.clientX - box.width - 12 : x) + "px";
  tip.style.top = Math.max(4, y + box.height > innerHeight ? event.clientY - box.height - 12 : y) + "px";
}
function read(svg) {
  if (svg.curves) return svg.curves;
  [svg.x0, svg.x1] = svg.dataset.x.split(" ").map(Number);
  [svg.y0, svg.y1] = svg.dataset.y.split(" ").map(v => svg.dataset.log === "1" ? Math.log(v) : Number(v));
  svg.curves = [...svg.querySelectorAll(".line")].map(path => ({ path, name: path.dataset.name,
    xs: path.dataset.xs.split(",").map(Number), ys: path.dataset.ys.split(",") }));
  svg.extra = svg.appendChild(document.createElementNS(SVG, "g"));
  return svg.curves;
}
function nearest(xs, x) {
  let low = 0, high = xs.length - 1;
  while (high - low > 1) { const middle = (low + high) >> 1; if (xs[middle] < x) low = middle; else high = middle; }
  return Math.abs(xs[low] - x) <= Math.abs(xs[high] - x) ? low : high;
}
function down(svg, y) {
  const v = svg.dataset.log === "1" ? Math.log(y) : y;
  return BOTTOM - (BOTTOM - TOP) * (v - svg.y0) / (svg.y1 - svg.y0);
}
function leave(svg) {
  tip.hidden = true;
  if (svg.extra) { svg.extra.replaceChildren(); svg.curves.forEach(c => c.path.classList.remove("near")); }
}
function point(svg, event) {
  const curves = read(svg), box = svg.getBoundingClientRect(), unit = box.width / 560;
  const px = Math.min(RIGHT, Math.max(LEFT, (event.clientX - box.left) / unit)), py = (event.clientY - box.top) / unit;
  const wanted = svg.x0 + (svg.x1 - svg.x0) * (px - LEFT) / (RIGHT - LEFT);
  let found = curves.map(c => { const i = nearest(c.xs, wanted); return { c, x: c.xs[i], y: c.ys[i] }; });
  const at = found.reduce((a, b) => Math.abs(b.x - wanted) < Math.abs(a.x - wanted) ? b : a).x;
  found = found.map(f => { const i = nearest(f.c.xs, at); return { c: f.c, x: f.c.xs[i], y: f.c.ys[i] }; })
    .filter(f => Math.abs(f.x - at) <= (svg.x1 - svg.x0) / 60);
  found.forEach(f => f.far = Math.abs(down(svg, f.y) - py));
  const many = found.length > 6;
  if (many) found = found.sort((a, b) => a.far - b.far).slice(0, 6);
  else found.reverse();  // they are drawn from the last to the first
  curves.forEach(c => c.path.classList.toggle("near", many && c === found[0].c));
  const across = LEFT + (RIGHT - LEFT) * (at - svg.x0) / (svg.x1 - svg.x0);
  const line = document.createElementNS(SVG, "path");
  line.setAttribute("class", "cursor"); line.setAttribute("d", `M${across} ${TOP}V${BOTTOM}`);
  svg.extra.replaceChildren(line, ...found.map(f => {
    const spot = document.createElementNS(SVG, "circle");
    spot.setAttribute("class", "spot " + f.c.path.classList[1]); spot.setAttribute("r", 3.5);
    spot.setAttribute("cx", LEFT + (RIGHT - LEFT) * (f.x - svg.x0) / (svg.x1 - svg.x0)); spot.setAttribute("cy", down(svg, f.y));
    return spot;
  }));
  const head = document.createElement("b");
  head.textContent = svg.dataset.unit + " " + at.toLocaleString("en");
  tip.replaceChildren(head, ...found.map(f => {
    const row = document.createElement("div"), name = document.createElement("i"), value = document.createElement("span");
    name.textContent = f.c.name; name.style.setProperty("--own", getComputedStyle(f.c.path).color); value.textContent = f.y;
    row.append(name, value); return row;
  }));
  place(event);
}
document.querySelectorAll("svg.lines").forEach(svg => {
  svg.addEventListener("pointermove", event => point(svg, event));
  svg.addEventListener("pointerleave", () => leave(svg));
});
document.querySelectorAll("[data-tip]").forEach(element => {
  element.addEventListener("pointermove", event => { tip.textContent = element.dataset.tip; place(event); });
  element.addEventListener("pointerleave", () => { tip.hidden = true; });
});
document.querySelectorAll("table.sortable th").forEach(head => {
  const button = document.createElement("button");
  button.append(...head.childNodes); head.append(button);
  button.addEventListener("click", () => {
    const falls = head.getAttribute("aria-sort") ? head.getAttribute("aria-sort") === "ascending" : head.classList.contains("n");
    head.parentElement.querySelectorAll("th").forEach(other => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", falls ? "descending" : "ascending");
    const body = head.closest("table").tBodies[0], key = row => row.cells[head.cellIndex].dataset.v ?? row.cells[head.cellIndex].textContent;
    const order = (a, b) => {
      const left = key(a), right = key(b);
      if (left === "" || right === "") return (left === "") - (right === "");
      const sign = falls ? -1 : 1, numbers = left - right;
      return sign * (Number.isNaN(numbers) ? left.localeCompare(right) : numbers);
    };
    body.append(...[...body.rows].sort(order));
  });
});
function open_linked() {
  const linked = location.hash && document.getElementById(location.hash.slice(1)), run = linked && linked.closest("details");
  if (run) { run.open = true; linked.scrollIntoView(); }
}
addEventListener("hashchange", open_linked); open_linked();
