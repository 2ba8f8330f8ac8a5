// What translated Python (javascript.py) needs and JavaScript lacks. Tuples and lists are arrays; a dictionary, a set
// and a record compare by value, through a text that stands for the value.
const py = (() => {
  const KEY = Symbol("key");
  const typeError = (what) => new TypeError(`Python's ${what} is not known for this value`);
  class Record { [Symbol.iterator]() { if (!this.isTuple) throw typeError("iteration"); return this.fields.map((name) => this[name])[Symbol.iterator](); } }

  const known = new Map();
  /** A short text for a long one, which is part of many others. */
  function interned(text) {
    if (!known.has(text)) known.set(text, `R${known.size}`);
    return known.get(text);
  }

  function key(value) {
    switch (typeof value) {
      case "number": return `n${value}`;
      case "boolean": return value ? "n1" : "n0";
      case "string": return `s${value.length}:${value}`;
    }
    if (value === null) return "N";
    if (Array.isArray(value)) return `(${value.map(key).join(",")})`;
    if (value instanceof Record) {
      if (!value[KEY]) {
        const text = `(${value.fields.map((name) => key(value[name])).join(",")})`;
        Object.defineProperty(value, KEY, { value: value.isTuple ? text : interned(value.constructor.name + text) });
      }
      return value[KEY];
    }
    throw typeError("hash");
  }

  class Dict {
    constructor(pairs = []) { this.map = new Map(); for (const [name, value] of pairs) this.set(name, value); }
    set(name, value) { const own = key(name), old = this.map.get(own); if (old) old[1] = value; else this.map.set(own, [name, value]); }
    has(name) { return this.map.has(key(name)); }
    find(name) { return this.map.get(key(name)); }
    get size() { return this.map.size; }
    *[Symbol.iterator]() { for (const [name] of this.map.values()) yield name; }
  }
  class Counter extends Dict {}
  class PySet {
    constructor(values = []) { this.map = new Map(); for (const value of values) this.map.set(key(value), value); }
    has(value) { return this.map.has(key(value)); }
    get size() { return this.map.size; }
    [Symbol.iterator]() { return this.map.values(); }
  }
  class Range {
    constructor(start, stop, step) { Object.assign(this, { start, stop, step }); }
    get length() { return Math.max(0, Math.ceil((this.stop - this.start) / this.step)); }
    has(value) { const place = (value - this.start) / this.step; return Number.isInteger(place) && place >= 0 && place < this.length; }
    *[Symbol.iterator]() { for (let i = 0, n = this.length; i < n; i += 1) yield this.start + i * this.step; }
  }
  class Words { constructor(words) { this.words = words; } }
  class PythonError extends Error { constructor(name, found, remedy) { super(found); this.name = name; this.remedy = remedy || ""; } }

  const isNumber = (value) => typeof value === "number" || typeof value === "boolean";
  const truth = (value) => {
    if (value === null || value === undefined) return false;
    if (typeof value !== "object") return Boolean(value);
    if (Array.isArray(value) || value instanceof Range) return value.length > 0;
    return value instanceof Dict || value instanceof PySet ? value.size > 0 : true;
  };
  const eq = (a, b) => {
    if (a === b) return true;
    if (typeof a !== "object" && typeof b !== "object" && a !== undefined && b !== undefined) return isNumber(a) && isNumber(b) && Number(a) === Number(b);
    if (a instanceof Dict || b instanceof Dict) throw typeError("==");
    return a !== undefined && b !== undefined && key(a) === key(b);
  };
  const compare = (a, b) => {
    if (isNumber(a) && isNumber(b)) return a - b || (a < b ? -1 : a > b ? 1 : 0);
    if (typeof a === "string" && typeof b === "string") return a < b ? -1 : a > b ? 1 : 0;
    if (!Array.isArray(a) || !Array.isArray(b)) throw typeError("<");
    for (let i = 0; i < a.length && i < b.length; i += 1) {
      if (!eq(a[i], b[i])) return compare(a[i], b[i]);
    }
    return a.length - b.length;
  };
  const number = (operation, name) => (a, b) => {
    if (isNumber(a) && isNumber(b)) return operation(Number(a), Number(b));
    throw typeError(name);
  };
  const nonzero = (value) => { if (value === 0) throw new PythonError("ZeroDivisionError", "division by zero"); return value; };
  const floordiv = number((a, b) => Math.floor(a / nonzero(b)), "//");
  const mod = number((a, b) => a - b * Math.floor(a / nonzero(b)), "%");
  const plainSub = number((a, b) => a - b, "-");
  const plainMul = number((a, b) => a * b, "*");

  function add(a, b) {
    if (isNumber(a) && isNumber(b)) return Number(a) + Number(b);
    if (typeof a === "string" && typeof b === "string") return a + b;
    if (Array.isArray(a) && Array.isArray(b)) return [...a, ...b];
    if (a instanceof Counter && b instanceof Counter) {  // keeps what is positive
      const sums = new Counter([...a.map.values()].map(([name, value]) => [name, value + (b.find(name) || [0, 0])[1]]));
      for (const [name, value] of b.map.values()) if (!sums.has(name)) sums.set(name, value);
      return new Counter([...sums.map.values()].filter(([, value]) => value > 0));
    }
    throw typeError("+");
  }
  function sub(a, b) {
    if (a instanceof PySet && b instanceof PySet) return new PySet([...a].filter((value) => !b.has(value)));
    return plainSub(a, b);
  }
  function mul(a, b) {
    if (Array.isArray(b)) return mul(b, a);
    if (!Array.isArray(a)) return plainMul(a, b);
    return [].concat(...Array.from({ length: Math.max(0, b) }, () => a));
  }
  function or_bits(a, b) {
    if (a instanceof Dict && b instanceof Dict) return new Dict([...a.map.values(), ...b.map.values()]);
    if (a instanceof PySet && b instanceof PySet) return new PySet([...a, ...b]);
    throw typeError("|");
  }
  function extended(a, b) {
    if (!Array.isArray(a)) return add(a, b);
    for (const value of b) a.push(value);
    return a;
  }
  function get(owner, name) {
    if (owner instanceof Dict) {
      const found = owner.find(name);
      if (found) return found[1];
      if (owner instanceof Counter) return 0;
      throw new PythonError("KeyError", String(name));
    }
    const values = owner instanceof Record || owner instanceof Range ? [...owner] : owner;
    const place = Number(name) < 0 ? values.length + Number(name) : Number(name);
    if (!(place in Object(values))) throw new PythonError("IndexError", `index ${name}`);
    return values[place];
  }
  function set_item(owner, name, value) {
    if (owner instanceof Dict) owner.set(name, value);
    else if (Array.isArray(owner)) owner[name < 0 ? owner.length + name : name] = value;
    else throw typeError("assignment to an item");
    return value;
  }
  function slice(values, start, stop, step) {
    if (step === -1 && start === null && stop === null) return [...values].reverse();
    const part = values.slice(start === null ? 0 : start, stop === null ? undefined : stop);
    if (step === null || step === 1) return part;
    if (step < 0) throw typeError("slice");
    return part.filter((_, place) => place % step === 0);
  }
  function contains(owner, value) {
    if (owner instanceof Dict || owner instanceof PySet || owner instanceof Range) return owner.has(value);
    if (typeof owner === "string") return owner.includes(value);
    return [...owner].some((each) => eq(each, value));
  }

  const METHODS = {
    append: (list, value) => { list.push(value); return null; },
    clear: (list) => { list.length = 0; return null; },
    extend: (list, values) => { list.push(...values); return null; },
    from_iterable: (_, lists) => [].concat(...lists),
    get: (dict, name, otherwise = null) => (dict.find(name) || [0, otherwise])[1],
    insert: (list, place, value) => { list.splice(place, 0, value); return null; },
    items: (dict) => [...dict.map.values()].map((pair) => [...pair]),
    join: (separator, texts) => [...texts].join(separator),
    keys: (dict) => [...dict],
    lower: (text) => text.toLowerCase(),
    pop: (owner, ...place) => {
      if (Array.isArray(owner)) {
        if (!owner.length) throw new PythonError("IndexError", "pop from empty list");
        return place.length ? owner.splice(place[0], 1)[0] : owner.pop();
      }
      const found = owner.find(place[0]);
      if (!found && place.length < 2) throw new PythonError("KeyError", String(place[0]));
      owner.map.delete(key(place[0]));
      return found ? found[1] : place[1];
    },
    popleft: (list) => list.shift(),
    removeprefix: (text, start) => (text.startsWith(start) ? text.slice(start.length) : text),
    setdefault: (dict, name, value) => { if (!dict.has(name)) dict.set(name, value); return dict.find(name)[1]; },
    startswith: (text, starts) => [].concat(starts).some((start) => text.startsWith(start)),
    values: (dict) => [...dict.map.values()].map(([, value]) => value),
  };
  function method(name, owner, ...args) {
    if (owner instanceof Record) {
      if (typeof owner[name] === "function") return owner[name](...args);
      throw typeError(name);
    }
    return METHODS[name](owner, ...args);
  }

  /** Splits keyword arguments, which come last, from the others. */
  const split = (args) => (args.at(-1) instanceof Words ? [args.slice(0, -1), args.at(-1).words] : [args, {}]);
  function extreme(sign) {
    return (...all) => {
      if (all.length === 2 && typeof all[0] === "number" && typeof all[1] === "number") return sign * (all[1] - all[0]) > 0 ? all[1] : all[0];
      const [args, { key: by = (value) => value, default: otherwise }] = split(all);
      let best, bestKey, isEmpty = true;
      for (const value of args.length === 1 ? args[0] : args) {
        const own = by(value);
        if (isEmpty || sign * compare(own, bestKey) > 0) [best, bestKey, isEmpty] = [value, own, false];
      }
      if (isEmpty && otherwise === undefined) throw new PythonError("ValueError", "max or min of nothing");
      return isEmpty ? otherwise : best;
    };
  }
  function sorted(...all) {
    const [[values], { key: by = (value) => value, reverse = false }] = split(all);
    const pairs = [...values].map((value) => [by(value), value]);
    pairs.sort((a, b) => (reverse ? -1 : 1) * compare(a[0], b[0]));
    return pairs.map(([, value]) => value);
  }
  function call(callee, args, words) {
    const values = [...args];
    for (const [name, value] of Object.entries(words)) {
      const place = callee.sig ? callee.sig.indexOf(name) : -1;
      if (place < args.length) throw new TypeError(`no keyword argument ${name}`);
      values[place] = value;
    }
    return Array.isArray(callee.prototype && callee.prototype.fields) ? new callee(...values) : callee(...values);
  }
  function replace(record, { words }) {
    for (const name of Object.keys(words)) if (!record.fields.includes(name)) throw new TypeError(`no field ${name}`);
    return new record.constructor(...record.fields.map((name) => (name in words ? words[name] : record[name])));
  }
  function cached(callee) {
    const results = new Map();
    const wrapped = (...args) => {
      const own = key(args);
      if (!results.has(own)) results.set(own, callee(...args));
      return results.get(own);
    };
    return Object.assign(wrapped, { sig: callee.sig });
  }
  function kept(owner, name, make) {
    const value = make.call(owner);
    Object.defineProperty(owner, name, { value });
    return value;
  }
  function round(value, digits = 0) {
    const scaled = value * 10 ** digits, below = Math.floor(scaled), rest = scaled - below;
    const up = rest > 0.5 || (rest === 0.5 && below % 2 !== 0);
    return (up ? below + 1 : below) / 10 ** digits;
  }
  function significant(value, digits) {  // Python's "g"
    if (value === 0 || !Number.isFinite(value)) return value === Infinity ? "inf" : String(value);
    const [mantissa, exponent] = value.toExponential(digits - 1).split("e");
    const power = Number(exponent);
    const plain = (text) => (text.includes(".") ? text.replace(/\.?0+$/, "") : text);
    if (power < -4 || power >= digits) return `${plain(mantissa)}e${power < 0 ? "-" : "+"}${String(Math.abs(power)).padStart(2, "0")}`;
    return plain(value.toFixed(Math.max(0, digits - 1 - power)));
  }
  function format(value, form) {
    if (form === "g") return significant(value, 6);
    const digits = Number(form.slice(1, -1));
    if (form.endsWith("g")) return significant(value, digits);
    if (form.endsWith("%")) return `${(100 * value).toFixed(digits)}%`;
    return value.toFixed(digits);
  }
  function str(value) {
    if (value instanceof Record && value.__str__) return value.__str__();
    if (typeof value === "string" || Number.isInteger(value)) return String(value);
    throw typeError("str");
  }
  const combined = (lists) => lists.reduce((found, list) => found.flatMap((start) => list.map((value) => [...start, value])), [[]]);
  function bisect_left(list, value) {
    let low = 0, high = list.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (list[middle] < value) low = middle + 1; else high = middle;
    }
    return low;
  }
  function insort_right(list, value) {
    let place = bisect_left(list, value);
    while (place < list.length && list[place] === value) place += 1;
    list.splice(place, 0, value);
    return null;
  }
  function counter(values = []) {
    const found = new Counter();
    if (values instanceof Dict) for (const [name, count] of values.map.values()) found.set(name, count);
    else for (const value of values) found.set(value, get(found, value) + 1);
    return found;
  }

  /** A comprehension over one iterable, without a generator, which would be slower. */
  function collect(values, make, test) {
    const found = [];
    for (const value of values) if (!test || test(value)) found.push(make(value));
    return found;
  }

  return {
    collect, Record, Dict, PythonError, truth, eq, compare, add, sub, mul, floordiv, mod, or_bits, extended, get, set_item, slice,
    contains, method, call, replace, cached, kept, round, format, str, sorted, key, bisect_left, insort_right,
    div: number((a, b) => a / nonzero(b), "/"),
    pow: number((a, b) => a ** b, "**"),
    and: (a, b) => (truth(a) ? b() : a),
    or: (a, b) => (truth(a) ? a : b()),
    max: extreme(1),
    min: extreme(-1),
    words: (words) => new Words(words),
    def: (sig, callee) => Object.assign(callee, { sig }),
    required: (name) => { throw new TypeError(`the argument ${name} is missing`); },
    error: (name, ...args) => new PythonError(name, ...args),
    dict: (pairs = []) => (pairs instanceof Dict ? new Dict(pairs.map.values()) : new Dict(pairs)),
    set: (values = []) => new PySet(values),
    Counter: counter,
    deque: (values = []) => [...values],
    chain: Object.assign((...lists) => lists.flatMap((list) => [...list]), { sig: [] }),
    combinations: (values, size) => { if (size !== 2) throw typeError("combinations"); const all = [...values]; return all.flatMap((a, i) => all.slice(i + 1).map((b) => [a, b])); },
    product: (...lists) => combined(lists.map((list) => [...list])),
    abs: Math.abs, ceil: Math.ceil, exp: Math.exp, floor: Math.floor, log: Math.log, log2: Math.log2, sqrt: Math.sqrt,
    prod: (values) => { let found = 1; for (const value of values) found *= value; return found; },
    sum: (values, start = 0) => { let found = start; for (const value of values) found = add(found, value); return found; },
    all: (values) => { for (const value of values) if (!truth(value)) return false; return true; },
    any: (values) => { for (const value of values) if (truth(value)) return true; return false; },
    bool: truth,
    chr: String.fromCharCode, ord: (text) => text.charCodeAt(0),
    divmod: (a, b) => [floordiv(a, b), mod(a, b)],
    enumerate: (values, start = 0) => Array.from(values, (value, place) => [place + start, value]),
    filter: (test, values) => [...values].filter((value) => truth(test ? test(value) : value)),
    float: Number,
    int: (value) => Math.trunc(Number(value)),
    len: (value) => (value instanceof Dict || value instanceof PySet ? value.size : value.length),
    list: (values = []) => [...values],
    tuple: (values = []) => [...values],
    range: (start, stop, step = 1) => (stop === undefined ? new Range(0, start, 1) : new Range(start, stop, step)),
    reversed: (values) => [...values].reverse(),
    vars: (record) => new Dict(record.fields.map((name) => [name, record[name]])),
    zip: (...all) => { const [lists] = split(all); const arrays = lists.map((list) => [...list]); return Array.from({ length: Math.min(...arrays.map((list) => list.length)) }, (_, i) => arrays.map((list) => list[i])); },
    quote: (text) => (/^[\w@%+=:,./-]+$/.test(text) ? text : `'${text.replace(/'/g, "'\"'\"'")}'`),
  };
})();
