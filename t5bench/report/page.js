// What the page can do besides being read: choose and find rows, sort them, read a figure with keys, copy a command.
const choices = document.getElementById("choices"), said = document.getElementById("said");

// ---- choosing and finding

function filter() {
  const unchecked = [...choices.querySelectorAll("[type=checkbox]:not(:checked)")];
  const text = choices.elements.text.value.toLowerCase(), hidden = new Set();
  for (const body of document.querySelectorAll("tbody[data-row]")) {
    const isChosen = !unchecked.some((box) => body.dataset[box.name] === box.value);
    body.hidden = !isChosen || !body.textContent.toLowerCase().includes(text);
    if (body.hidden) hidden.add(body.dataset.row);
  }
  for (const mark of document.querySelectorAll("figure [data-row]")) {
    const { row } = mark.dataset;  // what belongs to no row is about all of them
    mark.toggleAttribute("hidden", row ? hidden.has(row) : hidden.size > 0);
  }
}

// ---- sorting

function sort(event) {
  const head = event.currentTarget.closest("th"), table = head.closest("table"), ascending = head.ariaSort !== "ascending";
  table.querySelectorAll("thead th").forEach((other) => other.removeAttribute("aria-sort"));
  head.setAttribute("aria-sort", ascending ? "ascending" : "descending");
  const cell = (body) => body.rows[0].cells[head.cellIndex], value = (body) => cell(body).dataset.value ?? cell(body).textContent;
  const compare = (one, other) => one - other || one.localeCompare(other, "en", { numeric: true });
  const sorted = [...table.tBodies].sort((one, other) => compare(value(one), value(other)));
  table.append(...(ascending ? sorted : sorted.reverse()));
}

// ---- reading a figure: arrow keys go from one of its titles to the next, and each is said

function step(event) {
  const way = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key], figure = event.currentTarget;
  const titles = [...figure.querySelectorAll("title")].filter((title) => !title.closest("[hidden]"));
  if (!way || !titles.length) return;
  event.preventDefault();
  const before = titles.findIndex((title) => title.parentNode.classList.contains("read"));
  const next = titles.at((Math.max(before, way > 0 ? -1 : 0) + way) % titles.length);
  titles[before]?.parentNode.classList.remove("read");
  next.parentNode.classList.add("read");
  said.textContent = next.textContent;
}

for (const figure of document.querySelectorAll("figure [role=img]")) {
  figure.tabIndex = 0;
  figure.addEventListener("keydown", step);
  figure.addEventListener("blur", () => {
    figure.querySelectorAll(".read").forEach((mark) => mark.classList.remove("read"));
    said.textContent = "";
  });
}

// ---- the table: a small screen makes cards of the rows, which takes a table's own roles away

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
choices.addEventListener("input", filter);
