// What the page can do besides being read: choose, hover, sort, find, copy. Chart.js draws, from the figures' own data.
const { rows, figures } = JSON.parse(document.getElementById("data").textContent);
const choices = document.getElementById("choices"), said = document.getElementById("said");

function resolved(colour) {
  said.style.color = colour;
  const found = getComputedStyle(said).color;
  said.style.color = "";
  return found;
}

function isChosen(name) {
  const unchecked = [...choices.querySelectorAll("[type=checkbox]:not(:checked)")];
  return !rows[name] || !unchecked.some((box) => String(rows[name][box.name]) === box.value);
}

// ---- the figures

const REPLAY_MS = 8000;
const LOOKS = {
  bar: { type: "bar", grouped: false, barPercentage: 0.9, categoryPercentage: 0.8, order: 2, pointStyle: "rect" },
  stretch: { type: "bar", grouped: false, barPercentage: 1, categoryPercentage: 0.75, pointStyle: "rect" },
  interval: { type: "bar", grouped: false, barThickness: 7, order: 1, borderWidth: 1, borderSkipped: false, pointStyle: "rect" },
  line: { type: "line", pointRadius: 0, borderWidth: 2, pointStyle: "line" },
  dots: { type: "scatter", pointRadius: 3 },
  point: { type: "scatter", pointRadius: 7 },
  limit: { type: "scatter", pointStyle: "line", rotation: 90, pointRadius: 12, borderWidth: 3 },
};

function dataset(series) {
  const colour = resolved(series.colour || rows[series.row].colour);
  const borderColor = series.look === "interval" ? resolved("var(--paper)") : colour;
  const borderDash = series.colour ? [] : rows[series.row].dashes;
  const look = { ...LOOKS[series.look], backgroundColor: colour, borderColor, borderDash };
  return { ...look, label: series.label || series.row, series, data: series.points.map(([x, y]) => ({ x, y })) };
}

function valueText({ dataset: { series }, raw: { x, y } }) {
  const text = (value) => (value.toLocaleString ? value.toLocaleString("en", { maximumSignificantDigits: 5 }) : value);
  if (series.look === "stretch") return `${y}: ${series.label}, ${text(x[0])} to ${text(x[1])} ms`;
  const [start, end] = Array.isArray(x) ? x : [0, x];
  const number = text(series.look === "bar" ? end - start : end), interval = start && series.look === "interval";
  const own = series.points.length === 1 && series.text || (typeof y === "string" ? number : `${text(y)} at ${text(x)}`);
  const value = interval ? `${own}, between ${text(start)} and ${text(end)}` : own;
  return [...new Set([series.row, series.label, value])].filter(Boolean).join(": ");
}

function isTimeline(panel) {
  return panel.series.some(({ look }) => look === "stretch");
}

function configuration(figure, panel) {
  const all = panel.series.every(({ row }) => isChosen(row));  // what belongs to no row is about all of them
  const shown = panel.series.filter(({ row, points }) => points.length && (row ? isChosen(row) : all));
  const names = [...new Set(shown.flatMap((series) => series.points.map((point) => point[1])))];
  const byRow = typeof names[0] === "string", moments = isTimeline(panel);
  const color = resolved("var(--ink)"), grid = { color: resolved("var(--grid)") };
  const axis = (text, own) => ({ title: { display: Boolean(text), text, color }, ticks: { color }, grid, ...own });
  const format = { notation: "scientific", maximumSignificantDigits: 3 };
  const powers = panel.logarithmic && { type: "logarithmic", ticks: { color, format } };
  const short = Object.fromEntries(shown.filter(({ text }) => text?.length < 24).map(({ row, text }) => [row, text]));
  const lines = { callback: (_, number) => [names[number], short[names[number]]].filter(Boolean), color, autoSkip: false };
  const onceEach = (item, { datasets }) => datasets.findIndex(({ label }) => label === item.text) === item.datasetIndex;
  return {
    type: "bar",
    data: { datasets: shown.map(dataset) },
    options: {
      indexAxis: byRow ? "y" : "x", animation: false, maintainAspectRatio: false,
      interaction: { mode: byRow && !moments ? "y" : "nearest", axis: byRow ? "y" : "xy", intersect: moments },
      scales: {
        x: axis(figure.x, { type: "linear", beginAtZero: byRow, max: panel.most || undefined }),
        y: byRow ? axis("", { type: "category", labels: names, offset: true, ticks: lines })
          : axis(panel.y, { type: "linear", beginAtZero: panel.from_zero, grace: "5%", ...powers }),
      },
      plugins: {
        title: { display: Boolean(panel.title), text: panel.title, color },
        legend: { display: figure.columns !== 2 && (!byRow || shown.some((series) => series.label)),
          labels: { color, filter: onceEach, usePointStyle: true } },
        tooltip: { callbacks: { title: () => "", label: valueText } },
      },
    },
  };
}

let waiting = [];

function draw() {
  waiting = [];
  figures.forEach((figure, number) => {
    const place = document.querySelectorAll(".live")[number];
    place.querySelectorAll("canvas").forEach((canvas) => Chart.getChart(canvas)?.destroy());
    place.replaceChildren(...figure.panels.map((panel) => {
      const frame = document.createElement("div"), canvas = document.createElement("canvas");
      frame.style.height = `${96 * panel.height + (panel.series.some((series) => series.label) ? 130 : 70)}px`;
      frame.hidden = !panel.series.some(({ row }) => row && isChosen(row));
      canvas.tabIndex = 0;
      canvas.setAttribute("role", "img");
      canvas.setAttribute("aria-label", `${figure.title}, ${panel.title || panel.y}: arrow keys read the values`);
      canvas.addEventListener("keydown", step);
      frame.append(canvas);
      return frame;
    }));
    if (figure.panels.some(isTimeline)) place.prepend(player(place, figure));
    place.hidden = false;
    waiting.push(...[...place.querySelectorAll("canvas")].map((canvas, at) => [canvas, figure, figure.panels[at]]));
  });
  setTimeout(drawNear);
}

// A figure is drawn once it is about to be seen, so that the page answers at once.
function drawNear() {
  const isNear = ([canvas]) => canvas.getBoundingClientRect().top < 2 * innerHeight;
  const near = waiting.filter(isNear);
  waiting = waiting.filter((one) => !near.includes(one));
  near.forEach(([canvas, figure, panel]) => new Chart(canvas, configuration(figure, panel)));
}

// Replays the iteration: of the timelines, what comes after the moment is cut off.
function player(place, figure) {
  const end = Math.max(...figure.panels.flatMap(({ series }) => series.flatMap(({ points }) => points.map(([x]) => x[1]))));
  const [controls, button, moment, label] = ["p", "button", "input", "span"].map((name) => document.createElement(name));
  let plays = false;
  function show() {
    label.textContent = `${moment.valueAsNumber.toFixed()} of ${end.toFixed()} ms`;
    button.textContent = plays ? "pause" : "play";
    for (const chart of [...place.querySelectorAll("canvas")].map((canvas) => Chart.getChart(canvas)).filter(Boolean)) {
      const { x } = chart.scales;
      chart.options.clip = { left: 0, top: 0, bottom: 0, right: x.getPixelForValue(moment.value) - x.right };
      chart.update("none");
    }
  }
  function play(before) {
    setTimeout(() => {
      if (!plays || !moment.isConnected) return;
      const now = performance.now();
      moment.value = moment.valueAsNumber + end * (now - before) / REPLAY_MS;
      plays = moment.valueAsNumber < end;
      show();
      play(now);
    }, 30);
  }
  Object.assign(moment, { type: "range", max: end, step: "any", value: end, ariaLabel: "moment of the iteration" });
  moment.addEventListener("input", show);
  button.addEventListener("click", () => {
    plays = !plays;
    if (moment.valueAsNumber >= end) moment.value = 0;
    show();
    play(performance.now());
  });
  button.textContent = "play";
  controls.append(button, " ", moment, " ", label);
  return controls;
}

// Arrow keys go from value to value, and each is said.
function step(event) {
  const way = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key], chart = Chart.getChart(event.target);
  if (!way || !chart) return;
  event.preventDefault();
  const all = chart.data.datasets.flatMap(({ data }, datasetIndex) => data.map((_, index) => ({ datasetIndex, index })));
  chart.at = ((chart.at ?? (way > 0 ? -1 : 0)) + way + all.length) % all.length;
  chart.tooltip.setActiveElements([all[chart.at]], { x: 0, y: 0 });
  chart.update();
  const { datasetIndex, index } = all[chart.at], own = chart.data.datasets[datasetIndex];
  said.textContent = valueText({ dataset: own, raw: own.data[index] });
}

// ---- the table

function filter() {
  const text = choices.elements.text.value.toLowerCase();
  for (const body of document.querySelectorAll("tbody[data-row]")) {
    body.hidden = !isChosen(body.dataset.row) || !body.textContent.toLowerCase().includes(text);
  }
  setTimeout(drawNear);
}

function sort(event) {
  const head = event.currentTarget.closest("th"), table = head.closest("table"), ascending = head.ariaSort !== "ascending";
  table.querySelectorAll("thead th").forEach((other) => other.removeAttribute("aria-sort"));
  head.setAttribute("aria-sort", ascending ? "ascending" : "descending");
  const cell = (body) => body.rows[0].cells[head.cellIndex], value = (body) => cell(body).dataset.value ?? cell(body).textContent;
  const compare = (one, other) => one - other || one.localeCompare(other, "en", { numeric: true });
  const sorted = [...table.tBodies].sort((one, other) => compare(value(one), value(other)));
  table.append(...(ascending ? sorted : sorted.reverse()));
}

// A small screen makes cards of the rows, which takes a table's own roles away.
const roles = { table: "table", thead: "rowgroup", tbody: "rowgroup", tr: "row", "thead th": "columnheader", "tbody th": "rowheader", td: "cell" };
for (const [part, role] of Object.entries(roles)) {
  document.querySelectorAll(`.rows ${part}, ${part}.rows`).forEach((node) => node.setAttribute("role", role));
}
for (const head of document.querySelectorAll(".rows thead th")) {
  const button = document.createElement("button");
  button.append(...head.childNodes);
  button.addEventListener("click", sort);
  head.append(button);
}
for (const code of document.querySelectorAll(".more code")) {
  const button = document.createElement("button");
  button.textContent = "copy";
  button.addEventListener("click", async () => {
    getSelection().selectAllChildren(code);
    await navigator.clipboard.writeText(code.textContent).catch(() => document.execCommand("copy"));
    said.textContent = "Command copied.";
  });
  code.after(" ", button);
}
choices.hidden = false;
choices.addEventListener("submit", (event) => event.preventDefault());
choices.addEventListener("input", (event) => (event.target.type === "checkbox" && draw(), filter()));
for (const name of ["scroll", "resize"]) addEventListener(name, drawNear, { passive: true });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
draw();
