// The page's own functions, over every release and way, or its answer to an address. In place of a browser: elements
// that only remember.
"use strict";
const [, , path, address] = process.argv;
const page = require("fs").readFileSync(path, "utf8");
const [, json] = page.match(/id="data">([^]*?)<\/script>/);
const [, script] = page.match(/<script>\s*"use strict";([^]*?)<\/script>/);

function element() {
  return {
    value: "", className: "", textContent: "", children: [],
    replaceChildren(...children) {
      this.children = children;
      if (children[0] && "value" in children[0] && !this.value) this.value = children[0].value;
    },
    prepend() {},
  };
}

const elements = { data: Object.assign(element(), { textContent: json }) };
globalThis.document = { createElement: element, getElementById: id => (elements[id] ??= element()) };
globalThis.location = { hash: address || "" };
globalThis.history = { replaceState() {} };
const { data, found } = new Function(`${script}; return { data, found };`)();
const print = words => console.log(JSON.stringify(words));

if (address) {
  const { className, children } = elements.answer;
  print([className, ...children.map(each => each.textContent)]);
} else {
  for (const library in data.published)
    for (const release of data.published[library])
      for (const strategy in data.strategies)
        for (const mode in data.modes) {
          const result = found(library, release, strategy, mode);
          if (result) print([library, release, strategy, mode, result === "right" ? result : result.verdict]);
        }
}
