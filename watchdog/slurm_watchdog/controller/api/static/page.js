// Draws what the controller knows. Everything that comes from a job, a log or a user enters the page as text, never as markup.

import { buttons } from "./actions.js";

const EVERY_MS = 5000;
const main = document.getElementById("main");
const headline = document.getElementById("headline");
// Slurm's last word about a run that was requeued is that of the job, which runs again or waits.
const END_WORDS = { RUNNING: "requeued", PENDING: "requeued", REQUEUED: "requeued", COMPLETING: "ending", "": "-" };
const GPU_WORDS = { b: "works", i: "held by a process, idle", t: "slowed down", x: "named by an incident", e: "does not answer", u: "unknown, its node is silent", f: "free" };
const NODE_WORDS = { ok: "", named: "named by an incident", silent: "silent", away: "taken out by Slurm", unwatched: "no agent" };

const HIDDEN = /[\p{Cc}\p{Cf}\p{Cs}\p{Co}\p{Cn}\u2028\u2029]/gu;
let drawn = "";

// Characters that nobody sees, or that turn the text around them, are seen.
const plain = (value) => String(value).replace(/[\n\r\t]+/g, " ").replace(HIDDEN, "\ufffd");
const part = (text) => encodeURIComponent(String(text).replace(/\p{Cs}/gu, "\ufffd"));

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : plain(value));
  }
  element.append(...children.filter((each) => each !== null && each !== undefined).map((each) => (each instanceof Node ? each : plain(each))));
  return element;
}

function seconds(value) {
  if (value === null || value === undefined) return "-";
  if (value < 10) return `${value.toFixed(value < 1 ? 2 : 1)} s`;
  if (value < 120) return `${Math.round(value)} s`;
  if (value < 7200) return `${Math.round(value / 60)} min`;
  return `${(value / 3600).toFixed(1)} h`;
}

const count = (number, word) => `${number} ${word}${number === 1 ? "" : "s"}`;
const known = (value) => (value === null || value === undefined ? "-" : String(value));
// As in a terminal: 2026-11-21 19:48:20, where the reader is, whatever the browser's language.
function clock(at) {
  if (!at) return "-";
  const date = new Date(at * 1000), two = (number) => String(number).padStart(2, "0");
  return `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())} ${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
}
const read = (text) => { try { return decodeURIComponent(text); } catch { return text; } };
const link = (text, ...path) => make("a", { href: `#/${path.map(part).join("/")}` }, text);

function table(caption, headings, rows) {
  return make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption }, make("table", { role: "table" }, make("caption", {}, caption),
    make("thead", {}, make("tr", {}, ...headings.map((each) => make("th", { scope: "col" }, each)))),
    make("tbody", {}, ...rows.map(({ late, cells }) => make("tr", { class: late ? "late" : null, role: "row" },
      ...cells.map((each, index) => make("td", { role: "cell", "data-of": headings[index], class: each === "-" || each === "" ? "none" : null }, each)))))));
}

// ------------------------------------------------------------------------------------------------ pieces

// `floor`: what the curve stands on; without it a wobble of a thousandth would fill the height.
function curve(points, what, { large = false, floor = null } = {}) {
  const values = points.filter(([, value]) => value !== null);
  if (values.length < 2) return make("span", { class: "faint" }, "-");
  const ys = values.map(([, value]) => value), xs = values.map(([step]) => step);
  const low = Math.min(...ys, floor ?? Infinity), high = Math.max(...ys), first = Math.min(...xs), last = Math.max(...xs);
  const space = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(space, "svg"), title = document.createElementNS(space, "title"), line = document.createElementNS(space, "polyline");
  const label = `${what} from step ${first} to ${last}: first ${ys[0].toPrecision(3)}, now ${ys[ys.length - 1].toPrecision(3)}, at most ${high.toPrecision(3)}`;
  title.textContent = label;
  line.setAttribute("points", values.map(([step, value]) => `${(100 * (step - first)) / Math.max(1, last - first)},${38 - (36 * (value - low)) / (high - low || 1)}`).join(" "));
  svg.setAttribute("class", large ? "curve large" : "curve");
  svg.setAttribute("viewBox", "0 0 100 40");
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", label);
  svg.append(title, line);
  return large ? make("figure", {}, svg, make("figcaption", { class: "faint" }, label)) : svg;
}

function age(value, limit) {
  if (value === null || value === undefined) return "-";
  if (!limit) return `${seconds(value)} ago`;
  const late = value > limit, bar = make("i");
  bar.style.width = `${Math.min(100, (100 * value) / limit)}%`;
  return make("span", { title: `limit ${seconds(limit)}` }, make("span", { class: late ? "bar late" : "bar", "aria-hidden": "true" }, bar), `${seconds(value)} of ${seconds(limit)}`);
}

function nodeCell(row) {
  const words = [NODE_WORDS[row.state] || "", row.reason || ""].filter(Boolean).join(": ");
  const tally = {};
  for (const letter of row.gpus) tally[letter] = (tally[letter] || 0) + 1;
  const gpus = Object.entries(tally).map(([letter, number]) => `${number} GPU ${GPU_WORDS[letter]}`).join(", ");
  const label = [row.node, words, gpus, row.jobs ? `job ${row.jobs.join(", ")}` : ""].filter(Boolean).join("; ");
  const cell = make("a", { class: `node ${row.state}`, href: `#/node/${part(row.node)}`, title: label, "aria-label": label }, make("span", {}, row.node));
  if (row.gpus) {
    cell.append(make("span", { class: "gpus", "aria-hidden": "true" }, ...Array.from(row.gpus, (letter) => make("i", { class: `gpu ${letter}` }, "xetu".includes(letter) ? letter : ""))));
  }
  return cell;
}

function legend() {
  return make("ul", { class: "legend" }, ...Object.entries(GPU_WORDS).map(([letter, words]) => make("li", {}, make("i", { class: `gpu ${letter}` }, "xetu".includes(letter) ? letter : ""), words)));
}

function incidentCard(each) {
  return make("div", { class: `card ${each.severity}` },
    make("p", {}, link(each.kind, "incident", each.id), ` ${each.state}`, ...(each.job_ids || []).flatMap((job) => [" · job ", link(job, "job", job)]), ` · since ${clock(each.opened_at)}`),
    make("p", {}, each.summary),
    each.quiet ? make("p", { class: "faint" }, each.quiet) : null,
    each.inhibited_by ? make("p", { class: "faint" }, "explained by ", link(each.inhibited_by, "incident", each.inhibited_by)) : null);
}

function jobRow(job) {
  const how = job.health || { state: "not judged", level: "unknown", reason: "", todo: "" };
  const late = how.level === "critical" || (job.limit_s && job.progress_age_s > job.limit_s);
  const step = job.total_steps ? `${known(job.step)} / ${job.total_steps}` : known(job.step);
  return { late, cells: [link(job.job_id, "job", job.job_id), job.name, job.user, howCell(how), step, seconds(job.step_s), curve(job.times, "seconds a step", { floor: 0 }),
    age(job.progress_age_s, job.limit_s), `${known(job.ranks_alive)}/${known(job.ranks)}`, known(job.checkpoint_step), job.restarts] };
}

// As in `status --watch`: those that are nearest to their limit, or beyond it, come first.
const share = (job) => (job.limit_s && job.progress_age_s !== null ? Math.floor(job.progress_age_s / job.limit_s * 2) : 0);
const nearestFirst = (jobs) => [...jobs].sort((a, b) => share(b) - share(a));

// What a job does, and why it is not simply training.
const why = (how) => [how.reason, how.todo].filter(Boolean).join(". What to do: ");
const howCell = (how) => make("span", { class: how.level, title: why(how) || null }, how.state);

const JOB_HEADINGS = ["Job", "Name", "User", "State", "Step", "Step time", "Curve", "Last step ago", "Ranks alive", "Checkpoint", "Restarts"];

// ------------------------------------------------------------------------------------------------ views

function cluster(all) {
  const open = all.open.filter((each) => each.state === "firing").slice(0, 50);
  return [
    buttons(make, all, [all.paused ? ["Resume actions", "api/resume", {}] : ["Pause actions", "api/pause", {}]]),
    make("h2", {}, "What is wrong"),
    ...(open.length ? open.map(incidentCard) : [make("p", {}, all.level === "ok" ? "Nothing." : "No incident; see the headline for what is not known.")]),
    all.open.length > 50 ? make("p", {}, link(`all ${all.open.length} incidents`, "incidents")) : null,
    ...all.silences.filter((each) => each.until).map((each) => make("p", { class: "faint" }, `No messages about ${each.what} until ${clock(each.until)}, silenced by ${each.by}${each.reason ? `: ${each.reason}` : ""} (${each.id})`, buttons(make, all, [["End this silence", `api/silences/${part(each.id)}/end`, {}]]))),
    make("h2", {}, `Jobs (${all.jobs.length})`),
    all.jobs.length ? table("Running jobs that are watched", JOB_HEADINGS, nearestFirst(all.jobs).map(jobRow)) : make("p", {}, all.slurm_seen ? "No job is running." : "Not known: Slurm has not answered."),
    make("h2", {}, `Nodes and their GPUs (${all.map.length})`),
    all.map.some((row) => row.gpus) ? legend() : null,
    make("div", { class: "map" }, ...all.map.map(nodeCell)),
  ];
}

// What is remembered of a node; a controller that remembers nothing of it says 404.
function past(found) {
  if (!found || !found.history.length) return null;
  const verdict = `Suspicion ${found.score.toFixed(2)}, ${found.suspect ? "suspect" : "not suspect"} (from ${found.suspect_from} on)`;
  return table(`What happened before. ${verdict}`, ["When", "Weight", "Kind", "Part", "What"], found.history.map((each) => ({ late: false, cells: [
    clock(each.at), each.why_not || each.counts_for !== found.node ? "-" : each.weight.toFixed(2), each.incident_id ? link(each.kind, "incident", each.incident_id) : each.kind,
    each.place || "-", each.what + (each.node !== found.node ? ` [in ${each.node}]` : "") + (each.why_not ? ` (does not count: ${each.why_not})` : "")] })));
}

function nodes(found) {
  const rows = found.nodes.map((each) => ({ late: each.suspect, cells: [link(each.node, "node", each.node), each.score.toFixed(2), each.recent, each.events, clock(each.last_at), each.place || "-", each.reasons] }));
  return [
    make("h2", {}, "Nodes with a past, the worst first"),
    make("p", {}, found.known ? `${count(found.known, "node")}, ${found.suspects || "none"} of them suspect (from ${found.suspect_from} on)` : "Nothing is remembered against any node."),
    found.nodes.length ? table("Nodes", ["Node", "Suspicion", "14 days", "In all", "Last", "Part", "Reasons"], rows) : null,
  ];
}

function node(all, name, found) {
  const row = all.map.find((each) => each.node === name);
  if (!row) return [make("h2", {}, name), make("p", {}, "Unknown node: Slurm does not list it, and no agent reports from it.")];
  const open = all.open.filter((each) => each.summary.includes(name) && each.state === "firing");
  return [
    make("h2", {}, `Node ${name}`),
    make("p", {}, [NODE_WORDS[row.state] || "reports", row.reason].filter(Boolean).join(": ")),
    make("div", { class: "map" }, nodeCell(row)),
    ...open.map(incidentCard),
    past(found),
    table("Its GPUs", ["GPU", "It"], Array.from(row.gpus, (letter, index) => ({ late: "xe".includes(letter), cells: [index, GPU_WORDS[letter]] }))),
    table("Its jobs", JOB_HEADINGS, all.jobs.filter((job) => (row.jobs || []).includes(job.job_id)).map(jobRow)),
  ];
}

function job(all, found) {
  const clocks = found.ranks.map((each) => each.gpu_sm_clock_hz).filter((each) => each !== null);
  return [
    make("h2", {}, `Job ${found.job_id}: ${found.name}`),
    make("p", {}, `${found.state} of ${found.user} on ${count(found.nodes.length, "node")}, ${found.health ? found.health.state : "not judged"}, step ${known(found.step)}${found.total_steps ? ` of ${found.total_steps}` : ""}, checkpoint ${known(found.checkpoint_step)}, ${count(found.restarts, "restart")}. Last step: `, age(found.progress_age_s, found.limit_s)),
    buttons(make, all, [["Restart when it has saved", "api/restart", { job_id: found.job_id }], ["Cancel the restart", "api/restart/cancel", { job_id: found.job_id }]]),
    found.health && found.health.reason ? make("p", { class: found.health.level }, `${found.health.state}: ${why(found.health)}`) : null,
    ...all.open.filter((each) => each.job_ids.includes(found.job_id)).map(incidentCard),
    make("h2", {}, "Step time"), curve(found.times, "seconds a step", { large: true, floor: 0 }),
    found.losses.length > 1 ? make("h2", {}, "Loss") : null, found.losses.length > 1 ? curve(found.losses, "loss", { large: true }) : null,
    table(`Ranks (${found.ranks.length})`, ["Rank", "Node", "Pid", "State", "Cores", "GPU", "Busy", "Clock", "Power", "Temperature", "Waits"], found.ranks.map((each) => ({
      late: !each.alive || each.blocked !== null,
      cells: [each.rank, link(each.node, "node", each.node), each.pid, each.alive ? each.state : "gone", each.cpu_ratio === null ? "-" : each.cpu_ratio.toFixed(2), each.gpus.join(" ") || "-",
        each.gpu_utilization_ratio === null ? "-" : `${Math.round(100 * each.gpu_utilization_ratio)} %`,
        each.gpu_sm_clock_hz === null ? "-" : `${Math.round(each.gpu_sm_clock_hz / 1e6)} MHz${clocks.length > 1 && each.gpu_sm_clock_hz < 0.9 * Math.max(...clocks) ? " ↓" : ""}`,
        each.gpu_power_w === null ? "-" : `${Math.round(each.gpu_power_w)} W`, each.gpu_temperature_c === null ? "-" : `${Math.round(each.gpu_temperature_c)} °C`,
        each.blocked ? `${each.blocked}, ${seconds(each.blocked_s)}` : "-"],
    }))),
    found.past.length ? table("Earlier runs", ["Restart", "End", "Steps", "Checkpoint", "Took"], found.past.map((run) => ({ cells: [run.restarts, END_WORDS[run.state] || run.state, `${known(run.first_step)} – ${known(run.last_step)}`, known(run.checkpoint_step), seconds(run.seconds)] }))) : null,
  ];
}

function stackGroups(diagnosis, taken) {
  if (!diagnosis || !diagnosis.groups) return [];
  const odd = new Set(diagnosis.culprits.map((each) => each.rank));
  const groups = diagnosis.groups.map((group) => make("section", { class: group.ranks.some((rank) => odd.has(rank)) ? "group odd" : "group" },
    make("strong", {}, `${count(group.ranks.length, "rank")}: ${group.ranks.slice(0, 24).join(", ")}${group.ranks.length > 24 ? " …" : ""}`),
    make("div", { class: "faint" }, [group.place, group.hosts.slice(0, 8).join(", ")].filter(Boolean).join(" · ")),
    make("ol", {}, ...group.frames.slice(0, 40).map((frame) => make("li", {}, frame)))));
  return [make("h2", {}, "Where the ranks stood"), taken ? make("p", { class: "faint" }, taken) : null, make("p", {}, diagnosis.summary), make("div", { class: "groups" }, ...groups),
    ...(diagnosis.differences || []).map((each) => make("p", {}, each.line)),
    ...(diagnosis.hints || []).map((hint) => make("p", { class: "faint" }, `Usually: ${hint.usually} Try: ${hint.try_next}${hint.documented ? ` (${hint.documented})` : ""}`))];
}

// Quiet: messages about this kind of incident of its jobs, or on its nodes where it is of no job.
function incidentButtons(all, it) {
  const nodes = [...new Set(it.culprits.map((each) => each.node).filter(Boolean))], place = it.job_ids.length ? { jobs: it.job_ids } : { nodes };
  return it.state !== "firing" ? null : buttons(make, all, [["I look after it", `api/incidents/${part(it.id)}/acknowledge`, {}],
    ["Silence for 4 hours", "api/silences", { kinds: [it.kind], ...place, for_s: 14400 }], ...it.job_ids.map((job) => [`Restart job ${job}`, "api/restart", { job_id: job }])]);
}

function incident(all, found) {
  const it = found.incident;
  const who = it.culprits.map((each) => ({ cells: [each.node ? link(each.node, "node", each.node) : "-", known(each.rank), known(each.pid), known(each.gpu_uuid), each.path || each.mount || "-", each.reason || ""] }));
  const operations = found.actions.flatMap((action) => action.operations.map((operation) => ({ late: operation.outcome === "failed", cells: [action.action, operation.operation, known(operation.attempt), operation.outcome || "under way", operation.detail || "", clock(operation.intent_at)] })));
  return [
    make("h2", {}, `${it.kind} · ${it.state}`),
    make("div", { class: `card ${it.severity}` }, make("p", {}, it.summary), make("p", { class: "faint" }, `incident ${it.id}`, ...it.job_ids.flatMap((each) => [" · job ", link(each, "job", each)]), it.resolution ? ` · ${it.resolution}` : "")),
    incidentButtons(all, it),
    who.length ? table("Named", ["Node", "Rank", "Pid", "GPU", "File or mount", "Why"], who) : make("p", {}, "Nobody is named."),
    it.details_for ? make("p", { class: "faint" }, `Details are for ${it.details_for}.`) : null,
    make("h2", {}, "Evidence"), make("ul", {}, ...it.evidence.map((each) => make("li", {}, typeof each === "string" ? each : JSON.stringify(each)))),
    ...stackGroups(found.diagnosis, found.taken),
    it.decisions.length ? table("Decisions", ["Action", "Verdict", "By", "Why", "Outcome"], it.decisions.map((each) => ({ cells: [each.action, each.verdict, each.by, each.reason, each.outcome || "-"] }))) : null,
    operations.length ? table("Operations", ["Action", "Operation", "Try", "Outcome", "Detail", "At"], operations) : null,
    make("h2", {}, "Timeline"), make("ol", { class: "timeline" }, ...found.timeline.map((each) => make("li", {}, make("time", { datetime: new Date(each.at * 1000).toISOString() }, clock(each.at)), each.text))),
    found.evidence.length ? make("h2", {}, "Download") : null,
    found.gives_evidence ? make("ul", {}, ...found.evidence.map((each) => make("li", {}, make("a", { href: `api/incidents/${part(each.incident)}/evidence/${each.number}`, download: true }, `${each.kind} of ${clock(each.at)}`), ` ${each.taken}`)))
      : found.evidence.length ? make("p", { class: "faint" }, `${count(found.evidence.length, "piece")} kept. In a terminal: slurm-watchdog explain ${it.id} --bundle evidence.tar.gz (here, once security.page_token_file is set).`) : null,
  ];
}

function incidents(list) {
  return [make("h2", {}, "Incidents, newest first"), ...(list.length ? list.map(incidentCard) : [make("p", {}, "None so far.")])];
}

// ------------------------------------------------------------------------------------------------ the whole

async function ask(path) {
  const answer = await fetch(path, { signal: AbortSignal.timeout(10000) });
  const document = await answer.json();
  if (!answer.ok) throw Object.assign(new Error(document.error || answer.statusText), { status: answer.status });
  return document;
}

// The words and the level are the controller's: `status`, Slack and /healthz show the same.
const LEVELS = { ok: "OK", warning: "Warning", critical: "Critical", unknown: "Unknown" };
function say(all) {
  const text = `${LEVELS[all.level] || LEVELS.unknown}: ${all.headline}`;
  if (headline.textContent !== text) headline.textContent = plain(text);
  headline.className = all.level === "ok" ? "" : all.level === "warning" ? "warn" : "bad";
  document.getElementById("cluster").textContent = all.cluster;
  document.title = `${all.incidents.firing ? `(${all.incidents.firing}) ` : all.level === "ok" ? "" : "(?) "}slurm-watchdog ${all.cluster}`;
}

async function view(all, [kind, name]) {
  if (kind === "job") return job(all, await ask(`api/jobs/${part(name)}`));
  if (kind === "incident") return incident(all, await ask(`api/incidents/${part(name)}`));
  if (kind === "incidents") return incidents(await ask("api/incidents"));
  if (kind === "node") return node(all, name, await ask(`api/nodes/${part(name)}`).catch((error) => { if (error.status === 404 || error.status === 400) return null; throw error; }));
  if (kind === "nodes") return nodes(await ask("api/nodes"));
  return kind ? absent("There is no such page here.") : cluster(all);
}

const absent = (sentence) => [make("h2", {}, "Not found"), make("p", {}, sentence), make("p", {}, make("a", { href: "#/" }, "To the cluster"))];

// What does not exist is said as such: the controller answers, so it is no outage.
async function viewOrAbsent(all, route) {
  try {
    return await view(all, route);
  } catch (error) {
    if (error.status === 404 || error.status === 400) return absent(error.message);
    throw error;
  }
}

async function draw(moved) {
  const place = location.hash;
  try {
    const all = await ask("api/overview");
    say(all);
    const pieces = (await viewOrAbsent(all, place.replace(/^#\/?/, "").split("/").map(read))).filter(Boolean);
    if (place !== location.hash) return;
    const fresh = make("div", {}, ...pieces);
    const now = fresh.innerHTML;
    if (now === drawn && !moved) return;
    drawn = now;
    const focused = document.activeElement?.getAttribute("href"), scroll = window.scrollY;
    main.replaceChildren(...fresh.childNodes);
    if (moved) { window.scrollTo(0, 0); if (moved !== "first") main.focus({ preventScroll: true }); }
    else {
      window.scrollTo(0, scroll);
      if (focused) main.querySelector(`a[href="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
    }
    if (moved === "first") performance.mark("drawn");
  } catch (error) {
    headline.className = "bad";
    headline.textContent = `The controller does not answer: ${error.message}. What is below may be old.`;
  }
}

window.addEventListener("hashchange", () => draw("moved"));
await draw("first");
setInterval(() => { if (!document.hidden) draw(); }, EVERY_MS);
