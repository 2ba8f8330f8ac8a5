// What the page shows, and when. Every figure comes from the translated program above; nothing is computed here but the
// places of things on the screen.
const element = (id) => document.getElementById(id);
const GIB = 2 ** 30, TOP = 8;
const powers = (first, last) => Array.from({ length: last - first + 1 }, (_, place) => 2 ** (first + place));
const INPUTS = [
  { name: "model", label: "Model", values: [...MODELS] },
  { name: "device", label: "GPU", values: [...DEVICES_BY_NAME] },
  { name: "gpus", label: "GPUs", values: powers(0, 12) },
  { name: "perNode", label: "GPUs per node", values: [1, 2, 4, 8, 16] },
  { name: "link", label: "Gbit/s per node", values: [1, 10, 25, 50, 100, 200, 400, 800, 1600, 3200] },
  { name: "batch", label: "Samples per iteration", values: powers(0, 13) },
  { name: "billions", label: "Billion tokens to train", values: [0, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 15000] },
  { name: "price", label: "Price of a GPU's hour", values: [0, 0.25, 0.5, 0.75, 1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10, 15, 20] },
];
const PARTS = {
  weights: ["weights"], gradients: ["gradients"], optimizer: ["optimizer"],
  activations: ["encoder", "decoder", "ends of stacks", "recomputed layer"],
  "logits, loss": ["logits and loss"], buffers: [], "outside torch": [],
};
const COLOURS = ["#3b6fb6", "#d17c00", "#6a8f2b", "#a4508b", "#c4473a", "#2d8f8a", "#8a8f98"];

function make(tag, attributes = {}, ...children) {
  const isDrawing = ["svg", "rect", "text", "line", "title"].includes(tag) && attributes.drawing !== false;
  const made = isDrawing ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) if (name !== "drawing") made.setAttribute(name, value);
  made.append(...children.map((child) => (child instanceof Node ? child : String(child))));
  return made;
}
const short = (value) => py.format(value, ".4g");

const range = (interval, unit) => interval.map((end) => py.format(end / unit, ".3g")).join("-");

// ---- what is asked: the form, kept in the address, so that a link shows the same

function chosenAtFirst() {
  const found = { ...START };
  for (const [name, value] of new URLSearchParams(location.hash.slice(1))) if (name in found) found[name] = value;
  return found;
}

function makeForm() {
  const first = chosenAtFirst();
  for (const { name, label, values } of INPUTS) {
    const isChoice = typeof values[0] === "string";
    if (!isChoice && !values.includes(Number(first[name]))) values.push(Number(first[name]) || values[0]);
    if (!isChoice) values.sort((a, b) => a - b);
    const place = Math.max(0, values.findIndex((value) => String(value) === String(first[name])));
    const output = make("output");
    let control;
    if (isChoice) {
      control = make("select", { id: name }, ...values.map((value) => make("option", {}, value)));
      control.selectedIndex = place;
    } else {
      control = make("input", { id: name, type: "range", min: 0, max: values.length - 1, step: 1 });
      control.value = place;
      const say = () => { output.textContent = values[control.value]; control.setAttribute("aria-valuetext", values[control.value]); };
      control.addEventListener("input", say);
      say();
    }
    control.addEventListener("input", later);
    element("inputs").append(make("label", { for: name }, label, output, control));
  }
}

function asked() {
  const found = {};
  for (const { name, values } of INPUTS) {
    const control = element(name);
    found[name] = values[control.tagName === "SELECT" ? control.selectedIndex : control.value];
  }
  return found;
}

// ---- what the program answers

let answer = null;

function compute(wanted) {
  const [engines, given, isLaunchable] = py.get(MODELS, wanted.model);
  const perNode = Math.min(wanted.perNode, wanted.gpus);
  const machine = costmodel$prediction$machine_of(py.get(DEVICES_BY_NAME, wanted.device), wanted.link, perNode);
  if (wanted.gpus % perNode) throw py.error("Problem", `${wanted.gpus} GPUs do not fill nodes of ${perNode}`);
  const space = new choose$space$Space(engines, wanted.gpus, machine, wanted.batch, null, given, isLaunchable);
  const whole = wanted.billions ? new costmodel$whole_training$WholeTraining(wanted.billions * 1e9, wanted.price || null) : null;
  return { wanted, whole, candidates: space.ranked() };
}

let timer = 0;
function later() {
  clearTimeout(timer);
  element("verdict").textContent = "Computing.";
  timer = setTimeout(update, 60);
}

function update() {
  const wanted = asked(), problem = element("problem");
  try { history.replaceState(null, "", `#${new URLSearchParams(wanted)}`); } catch { /* some browsers forbid it for files */ }
  problem.hidden = true;
  try {
    answer = compute(wanted);
  } catch (error) {
    if (!(error instanceof py.PythonError)) throw error;
    problem.textContent = [error.message, error.remedy].filter(Boolean).join(". ") + ".";
    problem.hidden = false;
    element("results").hidden = true;
    element("verdict").textContent = "No layout.";
    return;
  }
  element("results").hidden = false;
  show();
}

function show() {
  const { wanted, whole, candidates } = answer;
  const figures = (candidate) => (whole ? py.method("items", whole.figures(candidate.job, candidate.seconds)) : []);
  const fitting = candidates.filter((candidate) => candidate.fits);
  const front = new Set(choose$space$pareto(candidates));
  const best = choose$space$one_to_run(candidates), [first] = fitting;
  element("verdict").textContent = `${wanted.gpus} x ${wanted.device}: ${fitting.length} of ${candidates.length} layouts fit. `
    + (best.start ? `${choose$space$which_to_run(candidates)}.` : `None can run here. The first in the ranking is ${first.title}, predicted to take ${short(first.seconds)} s.`);
  element("ranking-note").textContent = `${choose$space$not_told_apart(candidates)} ` + "* is on the Pareto front: no other layout is better in both memory and time. Choose a row for details.";
  const heads = ["layout", "s/iteration", "90 %", "samples/s", "TFLOP/s", "MFU", "GiB", "limited by", "front", "engine", "can run"];
  const rows = choose$space$shown_first(candidates, TOP);
  if (!rows.includes(best)) rows.push(best);
  heads.splice(4, 0, ...figures(best).map(([name]) => name));
  fill(element("ranking"), heads, rows.map((candidate, place) => {
    const radio = make("input", { type: "radio", name: "layout", id: `layout${place}` });
    radio.checked = candidate === best;
    radio.addEventListener("change", () => showOne(candidate));
    return [
      make("label", { for: `layout${place}` }, radio, " ", candidate.title), short(candidate.seconds), range(candidate.seconds_interval, 1),
      short(wanted.batch / candidate.seconds), ...figures(candidate).map(([, value]) => short(value)), short(candidate.tflops), candidate.mfu === null ? "" : py.format(candidate.mfu, ".1%"),
      short(candidate.memory_bytes / GIB), wordsOfLimit(candidate.limit), front.has(candidate) ? "*" : "", candidate.job.engine, candidate.missing || "yes",
    ];
  }));
  const reasons = [...choose$space$losers(candidates)];
  element("losers").replaceChildren(...reasons.map(([kind, reason]) => make("li", {}, make("strong", {}, kind), `: ${reason}`)));
  if (!reasons.length) element("losers").append(make("li", {}, "There is no other kind of layout."));
  showMemory(bestOfKinds(candidates));
  showOne(best);
}

function bestOfKinds(candidates) {
  const found = new Map();
  for (const candidate of candidates) if (!found.has(candidate.kind)) found.set(candidate.kind, candidate);
  return [...found.values()];
}

function fill(table, heads, rows) {
  const isNumber = (text) => typeof text === "string" && /^[\d.,e+\-%\u00b1 ]+$/.test(text);
  const cell = (content, place) => make(place ? "td" : "th", place ? (isNumber(content) ? { class: "number" } : {}) : { scope: "row" }, content);
  const numbers = heads.map((_, place) => rows.length > 0 && rows.every((row) => row[place] === "" || isNumber(row[place])) && rows.some((row) => row[place]));
  const head = heads.map((text, place) => make("th", { scope: "col", class: numbers[place] ? "number" : "" }, text));
  table.replaceChildren(make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...rows.map((row) => make("tr", {}, ...row.map(cell)))));
}

function partsOf(candidate) {
  const rest = new Map(py.method("items", candidate.memory.components)), found = [];
  for (const names of Object.values(PARTS)) {
    found.push(names.reduce((sum, name) => { const size = rest.get(name) || 0; rest.delete(name); return sum + size; }, 0));
  }
  found[found.length - 2] = [...rest.values()].reduce((sum, size) => sum + size, 0);
  found[found.length - 1] = candidate.memory_bytes - candidate.memory.peak;
  return found;
}

function showMemory(candidates) {
  const names = Object.keys(PARTS), limit = candidates[0].machine.device.memory;
  element("legend").replaceChildren(...names.map((name, place) => make("span", {}, make("i", { style: `background: ${COLOURS[place]}` }), name)));
  const largest = Math.max(limit, ...candidates.map((candidate) => Math.min(candidate.memory_bytes, 3 * limit)));
  const left = 150, width = 900 - left - 90, height = 30 * candidates.length + 24;
  const drawing = make("svg", { viewBox: `0 0 900 ${height}`, role: "img", "aria-label": "Memory of the fullest GPU by component, for the best layout of each kind" });
  candidates.forEach((candidate, row) => {
    let x = left;
    const y = 30 * row, end = left + width;
    drawing.append(make("text", { x: 0, y: y + 16 }, candidate.kind));
    partsOf(candidate).forEach((size, place) => {
      const wide = Math.max(0, Math.min(size / largest * width, end - x));
      const text = `${candidate.title}: ${names[place]} ${short(size / GIB)} GiB`;
      drawing.append(make("rect", { x, y: y + 2, width: wide, height: 20, fill: COLOURS[place] }, make("title", {}, text)));
      x += wide;
    });
    drawing.append(make("text", { x: Math.min(x + 6, end + 4), y: y + 16 }, `${short(candidate.memory_bytes / GIB)} GiB`));
  });
  const at = left + limit / largest * width;
  drawing.append(make("line", { x1: at, x2: at, y1: 0, y2: height - 18, stroke: "currentColor", "stroke-dasharray": "4 3" }));
  drawing.append(make("text", { x: at, y: height - 4, "text-anchor": at > 760 ? "end" : "middle", class: "soft" }, `the GPU has ${short(limit / GIB)} GiB`));
  element("memory").replaceChildren(drawing);
}

// As t5bench/text.py calls it.
function wordsOfLimit(limit) {
  return limit === "host" ? "waiting for the host" : limit;
}

function showOne(candidate) {
  const { job, time } = candidate;
  element("chosen").textContent = `${candidate.title}, TP/PP/DP ${py.str(job.parallel)}: ${short(candidate.seconds)} s per iteration, `
    + `${short(candidate.memory_bytes / GIB)} GiB (90 %: ${range(candidate.memory_interval, GIB)}), limited by ${wordsOfLimit(candidate.limit)}.`;
  const line = candidate.start || `The launchers cannot start it (${candidate.missing}).`;
  element("line").textContent = line;
  element("copy").disabled = !candidate.start;
  element("copied").textContent = "";
  element("copy").onclick = () => copy(line);
  showSchedule(candidate);
  const parts = py.method("items", time.parts);
  fill(element("times"), ["seconds", ...parts.map(([name]) => name), "all"], [["", ...parts.map(([, value]) => short(value)), short(time.total)]]);
  const sent = candidate.node_bytes, busiest = Math.max(...sent);
  element("sent").textContent = busiest ? `The busiest node sends ${short(busiest / 1e6)} MB to others per iteration.` : "No bytes leave a node.";
  const rows = costmodel$traffic$collectives_of(job).map((row) => [
    row.what, row.kind, row.group, String(row.stages.length), String(row.count), short(row.bytes / 1e6), row.when, row.overlap || "waits",
  ]);
  fill(element("collectives"), ["what", "kind", "group", "stages", "count", "MB each", "when", "hidden by"], rows);
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    element("copied").textContent = "Copied.";
  } catch {  // a page from a file may not write there
    getSelection().selectAllChildren(element("line"));
    element("copied").textContent = "Selected: press Ctrl+C.";
  }
}

function showSchedule(candidate) {
  const { job, machine } = candidate, stages = job.parallel.pipeline, all = job.micro_batches;
  const shown = Math.max(1, Math.min(all, Math.max(8, 2 * stages), Math.floor(2000 / stages)));
  const passes = Array.from({ length: stages }, (_, stage) => costmodel$time$stage_seconds(job, machine, stage));
  const slots = costmodel$schedule$one_f_one_b(passes.map(([forward]) => forward.seconds), passes.map(([, backward]) => backward.seconds), shown);
  const end = Math.max(...slots.map((slot) => slot.end)), left = 66, width = 900 - left, high = stages > 16 ? 8 : 20;
  const drawing = make("svg", { viewBox: `0 0 900 ${stages * (high + 4)}`, role: "img", "aria-label": `When each of ${stages} stages computes` });
  for (let stage = 0; stage < stages; stage += stages > 16 ? 8 : 1) {
    drawing.append(make("text", { x: 0, y: stage * (high + 4) + 15 }, `stage ${stage}`));
  }
  for (const slot of slots) {
    const x = left + slot.start / end * width, wide = (slot.end - slot.start) / end * width;
    const text = `${slot.way === "F" ? "forward" : "backward"} of micro-batch ${slot.micro_batch}, stage ${slot.stage}`;
    const colour = COLOURS[slot.way === "F" ? 0 : 1];
    drawing.append(make("rect", { x, y: slot.stage * (high + 4), width: wide, height: high, fill: colour, stroke: "var(--paper)" }, make("title", {}, text)));
    if (wide > 16 && high > 10) drawing.append(make("text", { x: x + wide / 2, y: slot.stage * (high + 4) + 15, "text-anchor": "middle", style: "fill: #fff; font-size: 11px" }, slot.micro_batch));
  }
  element("schedule-note").textContent = `Blue: forward. Orange: backward. Empty: waiting. ${shown < all ? `The first ${shown} of ${all} micro-batches` : `Micro-batches: ${all}`}, not counting waits for collectives.`;
  element("schedule").replaceChildren(drawing);
}

makeForm();
update();
