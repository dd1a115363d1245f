// Draws what the controller knows. Everything that comes from a job, a log or a user enters the page as text, never as markup.

import { chart, rankGrid, rankLetter, timeline, whoWaits } from "./charts.js";
import { clock, count, here, known, link, make, part, plain, seconds, svg } from "./dom.js";

const EVERY_MS = 5000;
const main = document.getElementById("main");
const headline = document.getElementById("headline");
// Slurm's last word about a run that was requeued is that of the job, which runs again or waits.
const END_WORDS = { RUNNING: "requeued", PENDING: "requeued", REQUEUED: "requeued", COMPLETING: "ending", "": "-" };
const GPU_WORDS = { b: "works", i: "held by a process, idle", t: "slowed down", x: "named by an incident", e: "does not answer", u: "unknown, its node is silent", f: "free" };
const NODE_WORDS = { ok: "", named: "named by an incident", silent: "silent", away: "taken out by Slurm", unwatched: "no agent" };

let drawn = "";

const read = (text) => { try { return decodeURIComponent(text); } catch { return text; } };

function table(caption, headings, rows) {
  return make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption }, make("table", { role: "table" }, make("caption", {}, caption),
    make("thead", {}, make("tr", {}, ...headings.map((each) => make("th", { scope: "col" }, each)))),
    make("tbody", {}, ...rows.map(({ late, cells }) => make("tr", { class: late ? "late" : null, role: "row" },
      ...cells.map((each, index) => make("td", { role: "cell", "data-of": headings[index], class: each === "-" || each === "" ? "none" : null }, each)))))));
}

// ------------------------------------------------------------------------------------------------ pieces

// A curve of a table's row: its shape, with its numbers in words.
function curve(points, what) {
  const values = points.filter(([, value]) => value !== null);
  if (values.length < 2) return make("span", { class: "faint" }, "-");
  const ys = values.map(([, value]) => value), xs = values.map(([step]) => step), high = Math.max(...ys), first = Math.min(...xs), last = Math.max(...xs);
  const label = `${what} from step ${first} to ${last}: first ${ys[0].toPrecision(3)}, now ${ys[ys.length - 1].toPrecision(3)}, at most ${high.toPrecision(3)}`;
  const line = values.map(([step, value]) => `${(100 * (step - first)) / Math.max(1, last - first)},${38 - (36 * Math.max(0, value)) / (high || 1)}`).join(" ");
  return svg("svg", { class: "curve", viewBox: "0 0 100 40", preserveAspectRatio: "none", role: "img", "aria-label": label }, svg("title", {}, label), svg("polyline", { points: line }));
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
    make("p", {}, each.headline || each.summary),
    each.quiet ? make("p", { class: "faint" }, each.quiet) : null,
    each.inhibited_by ? make("p", { class: "faint" }, "explained by ", link(each.inhibited_by, "incident", each.inhibited_by)) : null);
}

function jobRow(job) {
  const how = job.health || { state: "not judged", level: "unknown", reason: "", todo: "" };
  const late = how.level === "critical" || (job.limit_s && job.progress_age_s > job.limit_s);
  const step = job.total_steps ? `${known(job.step)} / ${job.total_steps}` : known(job.step);
  return { late, cells: [link(job.job_id, "job", job.job_id), job.name, job.user, howCell(how), step, seconds(job.step_s), curve(job.times, "seconds a step"),
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

const ofJobs = (ids) => ids.flatMap((each) => [" · job ", link(each, "job", each)]);

// What is being done, and what is left for a person.
function doing(all) {
  const left = all.todo.map((each) => make("li", {}, link(each.kind, "incident", each.incident), ...ofJobs(each.job_ids), ` · ${each.why}`, each.try ? make("div", { class: "faint" }, `Try: ${each.try}`) : null));
  const blind = all.jobs.filter((each) => each.health?.todo && !all.todo.some((one) => one.job_ids.includes(each.job_id))).slice(0, 10)
    .map((each) => make("li", {}, "job ", link(each.job_id, "job", each.job_id), ` · ${each.health.state}, ${each.health.reason}. ${each.health.todo}`));
  return [
    make("h2", {}, "What is being done"),
    all.doing.length ? make("ul", {}, ...all.doing.map((each) => make("li", {}, link(each.action, "incident", each.incident), ...ofJobs(each.job_id ? [each.job_id] : []), ` · since ${clock(each.at)}`, each.waits_for ? ` · waits for ${each.waits_for}` : "", each.until ? ` until ${clock(each.until)}` : "")))
      : make("p", {}, all.paused ? `Nothing: actions are paused by ${all.paused.by}.` : `Nothing is under way (mode ${all.mode}).`),
    make("h2", {}, "What you have to do"),
    left.length + blind.length ? make("ul", {}, ...left, ...blind) : make("p", {}, "Nothing."),
  ];
}

function cluster(all) {
  const open = all.open.filter((each) => each.state === "firing").slice(0, 50);
  return [
    make("h2", {}, "What is wrong"),
    ...(open.length ? open.map(incidentCard) : [make("p", {}, all.filter ? "No incident that the filter leaves." : all.level === "ok" ? "Nothing." : "No incident; see the headline for what is not known.")]),
    all.open.length > 50 ? make("p", {}, link(`all ${all.open.length} incidents`, "incidents")) : null,
    ...doing(all),
    ...all.silences.map((each) => make("p", { class: "faint" }, `No messages about ${["kinds", "jobs", "nodes"].filter((name) => each[name]).map((name) => `${name.slice(0, -1)} ${each[name].join(",")}`).join(", ")} until ${clock(each.until)}, silenced by ${each.by}${each.reason ? `: ${each.reason}` : ""} (${each.id})`)),
    make("h2", {}, `Jobs (${all.jobs.length})`),
    all.jobs.length ? table("Running jobs that are watched", JOB_HEADINGS, nearestFirst(all.jobs).map(jobRow)) : make("p", {}, all.slurm.age_s !== null ? "No job is running." : "Not known: Slurm has not answered."),
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

// Of many ranks those that are not simply at work, first; all of them under an address of their own.
const MOST_RANKS = 64;
function ranksOf(found, wanted) {
  const clocks = found.ranks.map((each) => each.gpu_sm_clock_hz).filter((each) => each !== null), best = clocks.length > 1 ? Math.max(...clocks) : 0;
  const few = found.ranks.length <= MOST_RANKS || wanted.get("ranks") === "all";
  const shown = few ? found.ranks : found.ranks.filter((each) => rankLetter(each) !== "b").slice(0, MOST_RANKS);
  return [
    make("h2", {}, `Ranks (${found.ranks.length})`), ...rankGrid(found.ranks),
    few ? null : make("p", {}, make("a", { href: `#/job/${part(found.job_id)}?ranks=all` }, `All ${found.ranks.length} ranks in a table`)),
    shown.length ? table(few ? "All ranks" : `${shown.length} that are not simply at work`, ["Rank", "Node", "Pid", "State", "Cores", "GPU", "Busy", "Clock", "Power", "Temperature", "Late", "Waits"], shown.map((each) => ({
      late: !each.alive || each.blocked !== null || each.late,
      cells: [each.rank, link(each.node, "node", each.node), each.pid, each.alive ? each.state : "gone", each.cpu_ratio === null ? "-" : each.cpu_ratio.toFixed(2), each.gpus.join(" ") || "-",
        each.gpu_utilization_ratio === null ? "-" : `${Math.round(100 * each.gpu_utilization_ratio)} %`,
        each.gpu_sm_clock_hz === null ? "-" : `${Math.round(each.gpu_sm_clock_hz / 1e6)} MHz${each.gpu_sm_clock_hz < 0.9 * best ? " ↓" : ""}`,
        each.gpu_power_w === null ? "-" : `${Math.round(each.gpu_power_w)} W`, each.gpu_temperature_c === null ? "-" : `${Math.round(each.gpu_temperature_c)} °C`,
        each.late_ratio === null ? "-" : `${Math.round(100 * each.late_ratio)} %${each.late ? " late" : ""}`, each.blocked ? `${each.blocked}, ${seconds(each.blocked_s)}` : "-"],
    }))) : null,
    found.ranks.some((each) => each.late_ratio !== null) ? make("p", { class: "faint" }, "Late: the share of the last ten minutes in which the other ranks wait for others and this one does not. A rank that has more to do than the others is late, too, and nothing is wrong with it.") : null,
  ];
}

// What `slurm-watchdog run` in the job can still do in its allocation.
function supervisedBy(its) {
  const spares = its.spares.length ? `spare ${its.spares.join(", ")}` : "no spare node";
  const left = its.avoided.length ? `; does without ${its.avoided.join(", ")}` : "";
  return `Under slurm-watchdog run: start ${its.starts}, ${its.state}, ${count(its.restarts_left, "restart")} left, ${spares}${left}. ${its.words}`;
}

function job(all, found, wanted) {
  return [
    make("h2", {}, `Job ${found.job_id}: ${found.name}`),
    make("p", {}, `${found.state} of ${found.user} on ${count(found.nodes.length, "node")}, ${found.health ? found.health.state : "not judged"}, step ${known(found.step)}${found.total_steps ? ` of ${found.total_steps}` : ""}, checkpoint ${known(found.checkpoint_step)}, ${count(found.restarts, "restart")}. Last step: `, age(found.progress_age_s, found.limit_s)),
    found.health && found.health.reason ? make("p", { class: found.health.level }, `${found.health.state}: ${why(found.health)}`) : null,
    found.supervisor ? make("p", {}, supervisedBy(found.supervisor)) : null,
    ...all.open.filter((each) => each.job_ids.includes(found.job_id)).map(incidentCard),
    found.history ? make("h2", {}, "From its first run to now") : null, timeline(found.history, all.at),
    make("h2", {}, "Step time"), chart(found.times, "Step time", "s", 0),
    found.losses.length > 1 ? make("h2", {}, "Loss") : null, found.losses.length > 1 ? chart(found.losses, "Loss", "") : null,
    ...ranksOf(found, wanted),
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
  return [make("h2", {}, "Where the ranks stood"), taken ? make("p", { class: "faint" }, taken) : null, make("p", {}, diagnosis.summary), whoWaits(diagnosis), make("div", { class: "groups" }, ...groups),
    ...(diagnosis.differences || []).map((each) => make("p", {}, each.line)),
    ...(diagnosis.hints || []).map((hint) => make("p", { class: "faint" }, `Usually: ${hint.usually} Try: ${hint.try_next}${hint.documented ? ` (${hint.documented})` : ""}`))];
}

function incident(all, found) {
  const it = found.incident, stacks = found.evidence.filter((each) => each.kind === "diagnosis").pop();
  const who = it.culprits.map((each) => ({ cells: [each.node ? link(each.node, "node", each.node) : "-", known(each.rank), known(each.pid), known(each.gpu_uuid), each.path || each.mount || "-", each.reason || ""] }));
  const operations = found.actions.flatMap((action) => action.operations.map((operation) => ({ late: operation.outcome === "failed", cells: [action.action, operation.operation, known(operation.attempt), operation.outcome || "under way", operation.detail || "", clock(operation.intent_at)] })));
  return [
    make("h2", {}, `${it.kind} · ${it.state}`),
    make("div", { class: `card ${it.severity}` }, make("p", {}, make("strong", {}, it.headline || it.summary)), make("p", {}, it.summary), make("p", { class: "faint" }, `incident ${it.id}`, ...it.job_ids.flatMap((each) => [" · job ", link(each, "job", each)]), it.resolution ? ` · ${it.resolution}` : "")),
    who.length ? table("Named", ["Node", "Rank", "Pid", "GPU", "File or mount", "Why"], who) : make("p", {}, "Nobody is named."),
    it.details_for ? make("p", { class: "faint" }, `Details are for ${it.details_for}.`) : null,
    make("h2", {}, "Evidence"), make("ul", {}, ...it.evidence.map((each) => make("li", {}, typeof each === "string" ? each : JSON.stringify(each)))),
    ...stackGroups(stacks?.document, stacks?.taken),
    it.decisions.length ? table("Decisions", ["Action", "Verdict", "By", "Why", "Outcome"], it.decisions.map((each) => ({ cells: [each.action, each.verdict, each.by, each.reason, each.outcome || "-"] }))) : null,
    operations.length ? table("Operations", ["Action", "Operation", "Try", "Outcome", "Detail", "At"], operations) : null,
    make("h2", {}, "Timeline"), make("ol", { class: "timeline" }, ...found.timeline.map((each) => make("li", {}, make("time", { datetime: new Date(each.at * 1000).toISOString() }, clock(each.at)), each.text))),
    found.evidence.length ? make("h2", {}, "Download") : null,
    make("ul", {}, ...found.evidence.map((each) => make("li", {}, make("a", { href: `api/incidents/${part(each.incident)}/evidence/${each.number}`, download: `${each.incident}-${each.number}.json` }, `${each.kind} of ${clock(each.at)}`), ` ${each.taken}`))),
  ];
}

function incidents(list) {
  return [make("h2", {}, "Incidents, newest first"), ...(list.length ? list.map(incidentCard) : [make("p", {}, "None so far.")])];
}

// ------------------------------------------------------------------------------------------------ the whole

async function ask(path) {
  const answer = await fetch(here(path), { signal: AbortSignal.timeout(10000) });
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

// What of the overview has every word of the filter; the address has it, so it can be shared.
function filtered(all, words) {
  const has = (...texts) => words.every((word) => texts.flat().join(" ").toLowerCase().includes(word));
  return !words.length ? all : { ...all,
    jobs: all.jobs.filter((each) => has(each.job_id, each.name, each.user, each.health?.state || "", each.nodes)),
    filter: true, todo: (all.todo || []).filter((each) => has(each.kind, each.why, each.job_ids)), doing: (all.doing || []).filter((each) => has(each.action, each.job_id || "")),
    open: all.open.filter((each) => has(each.kind, each.state, each.summary, each.job_ids)),
    map: all.map.filter((each) => has(each.node, NODE_WORDS[each.state] || "", each.reason || "", each.jobs || [])) };
}

async function view(whole, [kind, name], wanted) {
  const words = (wanted.get("q") || "").toLowerCase().split(/\s+/).filter(Boolean), all = filtered(whole, kind ? [] : words);
  if (kind === "job") {
    const found = await ask(`api/jobs/${part(name)}`);
    return found.ended ? [make("h2", {}, `Job ${found.job_id}, which does not run`), timeline(found.history, all.at), make("p", {}, `In a terminal: slurm-watchdog show ${found.job_id}`)] : job(all, found, wanted);
  }
  if (kind === "incident") return incident(all, await ask(`api/incidents/${part(name)}`));
  if (kind === "incidents") return incidents((await ask("api/incidents")).sort((a, b) => b.opened_at - a.opened_at).filter((each) => filtered({ jobs: [], map: [], open: [each] }, words).open.length));
  if (kind === "node") return node(all, name, await ask(`api/nodes/${part(name)}`).catch((error) => { if (error.status === 404 || error.status === 400) return null; throw error; }));
  if (kind === "nodes") return nodes(await ask("api/nodes"));
  return kind ? absent("There is no such page here.") : cluster(all);
}

const absent = (sentence) => [make("h2", {}, "Not found"), make("p", {}, sentence), make("p", {}, make("a", { href: "#/" }, "To the cluster"))];

// What does not exist is said as such: the controller answers, so it is no outage.
async function viewOrAbsent(all, place) {
  const [path, query] = place.replace(/^#\/?/, "").split("?");
  try {
    return await view(all, path.split("/").map(read), new URLSearchParams(query));
  } catch (error) {
    if (error.status === 404 || error.status === 400) return absent(error.message);
    throw error;
  }
}

async function draw(moved) {
  const place = location.hash;
  try {
    const all = await ask("api/overview");
    for (const each of all.jobs) each.times = all.curves[each.job_id];
    say(all);
    const pieces = (await viewOrAbsent(all, place)).filter(Boolean);
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
    if (moved) performance.mark("drawn");
  } catch (error) {
    headline.className = "bad";
    headline.textContent = `The controller does not answer: ${error.message}. What is below may be old.`;
  }
}

const filter = document.getElementById("filter");
const asked = () => new URLSearchParams(location.hash.split("?")[1]).get("q") || "";
filter.value = asked();
filter.addEventListener("input", () => {
  const path = /^#\/incidents/.test(location.hash) ? "#/incidents" : "#/";
  history.replaceState(null, "", filter.value.trim() ? `${path}?${new URLSearchParams({ q: filter.value })}` : path);
  draw();
});
window.addEventListener("hashchange", () => { if (document.activeElement !== filter) filter.value = asked(); });
window.addEventListener("hashchange", () => draw("moved"));
await draw("first");
setInterval(() => { if (!document.hidden) draw(); }, EVERY_MS);
