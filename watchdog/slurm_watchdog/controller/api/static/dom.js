// Elements and words. Whatever enters the page passes `plain`, and enters it as text, never as markup.

const HIDDEN = /[\p{Cc}\p{Cf}\p{Cs}\p{Co}\p{Cn}\u2028\u2029]/gu;

// Characters that nobody sees, or that turn the text around them, are seen.
export const plain = (value) => String(value).replace(/[\n\r\t]+/g, " ").replace(HIDDEN, "\ufffd");
export const part = (text) => encodeURIComponent(String(text).replace(/\p{Cs}/gu, "\ufffd"));

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : plain(value));
  }
  element.append(...children.filter((each) => each !== null && each !== undefined).map((each) => (each instanceof Node ? each : plain(each))));
  return element;
}

export const make = (tag, attributes = {}, ...children) => filled(document.createElement(tag), attributes, children);
export const svg = (tag, attributes = {}, ...children) => filled(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
export const link = (text, ...path) => make("a", { href: `#/${path.map(part).join("/")}` }, text);

export function seconds(value) {
  if (value === null || value === undefined) return "-";
  if (value < 10) return `${value.toFixed(value < 1 ? 2 : 1)} s`;
  if (value < 120) return `${Math.round(value)} s`;
  if (value < 7200) return `${Math.round(value / 60)} min`;
  return `${(value / 3600).toFixed(1)} h`;
}

export const count = (number, word) => `${number} ${word}${number === 1 ? "" : "s"}`;
export const known = (value) => (value === null || value === undefined ? "-" : String(value));
// As in a terminal: 2026-11-21 19:48:20, where the reader is, whatever the browser's language.
export function clock(at) {
  if (!at) return "-";
  const date = new Date(at * 1000), two = (number) => String(number).padStart(2, "0");
  return `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())} ${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
}

// 0-2, 5: numbers in ranges.
export function ranges(numbers) {
  const found = [];
  for (const each of [...new Set(numbers)].sort((a, b) => a - b)) {
    const last = found[found.length - 1];
    if (last && each === last[1] + 1) last[1] = each; else found.push([each, each]);
  }
  return found.map(([low, high]) => (low === high ? `${low}` : `${low}-${high}`)).join(", ");
}

// An address of this page without the name and password that its own may have: fetch refuses those, and the browser sends them anyway.
export function here(path) {
  const address = new URL(path, location.href);
  address.username = address.password = "";
  return address;
}
