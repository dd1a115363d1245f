// The page is whole without this: it asks for the same address every few seconds, and puts what has changed in its place.

const EVERY_MS = 5000;
const main = document.getElementById("main"), headline = document.getElementById("headline"), filter = document.getElementById("filter");
let drawn = main.innerHTML;

// Without the name and password that an address may have: fetch refuses those, and the browser sends them anyway.
function here() {
  const address = new URL(location.href);
  address.username = address.password = address.hash = "";
  return address;
}

async function ask() {
  const answer = await fetch(here(), { signal: AbortSignal.timeout(10000) }), text = await answer.text();
  const page = new DOMParser().parseFromString(text, "text/html");
  const said = page.getElementById("headline")?.textContent;
  if (!said || answer.status >= 500) throw new Error(said || (text.startsWith("{") ? JSON.parse(text).error : answer.statusText || `status ${answer.status}`));
  return page;
}

async function draw() {
  const place = location.search;
  try {
    const page = await ask();
    if (place !== location.search) return;
    const said = page.getElementById("headline"), now = page.getElementById("main").innerHTML;
    if (headline.textContent !== said.textContent) headline.textContent = said.textContent;
    headline.className = said.className;
    document.title = page.title;
    document.querySelector("footer")?.replaceWith(page.querySelector("footer") ?? "");
    if (now === drawn) return;
    drawn = now;
    const focused = document.activeElement?.getAttribute("href"), scroll = window.scrollY;
    main.replaceChildren(...page.getElementById("main").childNodes);
    window.scrollTo(0, scroll);
    if (focused) main.querySelector(`a[href="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
  } catch (error) {
    headline.className = "bad";
    headline.textContent = `The controller does not answer: ${error.message}. What is below may be old.`;
  }
}

filter.addEventListener("input", () => {
  const words = new URLSearchParams(filter.form.elements.incidents ? { incidents: "" } : {});
  if (filter.value.trim()) words.set("q", filter.value);
  history.replaceState(null, "", `?${words}`);
  draw();
});
// Addresses of release 0.1: #/job/7, #/incident/ID, in messages that were sent.
const old = location.hash.match(/^#\/(job|incident|node)\/([^?]+)/);
if (old) location.replace(`?${old[1]}=${old[2]}`);
setInterval(() => { if (!document.hidden) draw(); }, EVERY_MS);
