// Pictures of numbers: each has axes with units where it has axes, and says in words what it shows.

import { clock, count, make, part, plain, ranges, seconds, svg } from "./dom.js";

const WIDE = 480, HIGH = 150, LEFT = 52, TOP = 20;
const short = (text, size) => (text.length > size ? `${text.slice(0, size - 1)}…` : text);

// Round numbers from at most `low` to at least `high`, six or fewer.
export function ticks(low, high) {
  const raw = Math.max(high - low, Math.abs(high) * 1e-3, 1e-9) / 5, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((each) => each >= raw * 0.999999), found = [];
  for (let number = Math.floor(low / step + 1e-9); found.length < 8; number++) {
    found.push(Number((number * step).toPrecision(12)));
    if (number * step >= high - step * 1e-9 && found.length > 1) break;
  }
  return found;
}

const number = (value) => (Math.abs(value) >= 1e5 || (value !== 0 && Math.abs(value) < 1e-3) ? value.toExponential(0) : String(value));
const drawing = (high, label, ...pieces) => svg("svg", { class: "chart", viewBox: `0 0 ${WIDE + LEFT + 20} ${high}`, role: "img", "aria-label": label }, svg("title", {}, label), ...pieces);
const text = (x, y, words, anchor = "start") => svg("text", { x: x.toFixed(1), y: y.toFixed(1), "text-anchor": anchor }, words);
const line = (x1, y1, x2, y2) => svg("line", { x1: x1.toFixed(1), y1: y1.toFixed(1), x2: x2.toFixed(1), y2: y2.toFixed(1) });
const rect = (x, y, width, height, kind, words) => svg("rect", { x: x.toFixed(1), y: y.toFixed(1), width: Math.max(1, width).toFixed(1), height, class: kind }, svg("title", {}, words));

// Values over steps. `floor`: what it stands on; without it a wobble of a thousandth would fill the height.
export function chart(points, what, unit, floor = null) {
  const values = points.filter(([, value]) => value !== null);
  if (values.length < 2) return make("p", { class: "faint" }, "Not enough steps yet.");
  const ys = values.map(([, value]) => value), xs = values.map(([step]) => step);
  const up = ticks(Math.min(...ys, floor ?? Infinity), Math.max(...ys)), first = Math.min(...xs), last = Math.max(...xs);
  const x = (step) => LEFT + (WIDE * (step - first)) / Math.max(1, last - first), y = (value) => TOP + HIGH - (HIGH * (value - up[0])) / (up[up.length - 1] - up[0]);
  const across = ticks(first, last).filter((each) => each >= first && each <= last && Number.isInteger(each));
  const label = `${what} from step ${first} to ${last}: first ${ys[0].toPrecision(3)}, now ${ys[ys.length - 1].toPrecision(3)}, at most ${Math.max(...ys).toPrecision(3)} ${unit}`;
  return make("figure", {}, drawing(TOP + HIGH + 34, label,
    ...up.flatMap((each) => [line(LEFT, y(each), LEFT + WIDE, y(each)), text(LEFT - 6, y(each) + 4, number(each), "end")]),
    ...across.flatMap((each) => [line(x(each), TOP + HIGH, x(each), TOP + HIGH + 4), text(x(each), TOP + HIGH + 16, each, "middle")]),
    text(4, 11, `${what}${unit ? `, ${unit}` : ""}`), text(LEFT + WIDE / 2, TOP + HIGH + 31, "step", "middle"),
    svg("polyline", { points: values.map(([step, value]) => `${x(step).toFixed(1)},${y(value).toFixed(1)}`).join(" ") })), make("figcaption", { class: "faint" }, label));
}

// A job from its first run to now: each run with its start, its steps and what came after the last, its incidents, what was done.
export function timeline(found, now) {
  if (!found || !found.runs.length) return null;
  const first = Math.min(...found.runs.map((run) => run.began_at)), end = (each) => each ?? now;
  const last = Math.max(first + 60, ...found.runs.map((run) => end(run.ended_at)), ...found.incidents.map((each) => end(each.resolved_at)));
  const from = Math.min(first, ...found.incidents.map((each) => each.opened_at)), x = (at) => LEFT + 40 + ((WIDE - 40) * (at - from)) / (last - from);
  const bar = (a, b, row, kind, words) => rect(x(a), 4 + row * 24, x(b) - x(a), 16, kind, words);
  const runs = found.runs.flatMap((run) => {
    const over = end(run.ended_at), rose = run.first_rise_at ?? over, stood = run.last_rise_at ?? over, name = `run ${run.restarts}, ${clock(run.began_at)} to ${run.ended_at ? clock(run.ended_at) : "now"}`;
    return [bar(run.began_at, rose, 0, "start", `${name}: no step for ${seconds(rose - run.began_at)}`), rose < over ? bar(rose, stood, 0, "steps", `${name}: steps ${run.first_step} to ${run.last_step}`) : null,
      run.ended_at && stood < over ? bar(stood, over, 0, "stood", `${name}: no new step for ${seconds(over - stood)}, then ${run.state || "its end"}`) : null];
  });
  const incidents = found.incidents.map((each) => svg("a", { href: `#/incident/${part(each.id)}` }, bar(each.opened_at, end(each.resolved_at), 1, each.severity, `${each.kind}, ${clock(each.opened_at)} to ${each.resolved_at ? clock(each.resolved_at) : "now"}`)));
  const actions = found.actions.map((each) => bar(each.at, end(each.end?.ended_at), 2, each.end?.ok === false ? "stood" : "act", `${each.action} ${clock(each.at)}: ${each.end?.detail || "under way"}`));
  const marks = [0, 1, 2, 3].map((each) => from + ((last - from) * each) / 3);
  const label = `${count(found.runs.length, "run")}, ${count(found.incidents.length, "incident")}, ${count(found.actions.length, "action")} from ${clock(from)} to ${clock(last)}`;
  return make("figure", {}, drawing(108, label, ...["runs", "incidents", "actions"].map((each, row) => text(0, 17 + row * 24, each)), ...runs, ...incidents, ...actions,
    line(LEFT + 40, 78, LEFT + WIDE, 78), ...marks.flatMap((at, index) => [line(x(at), 78, x(at), 82), text(x(at), 95, clock(at).slice(5, 16), index === 3 ? "end" : index ? "middle" : "start")])),
    make("figcaption", { class: "faint" }, `${label}. Grey: before the first step, green: steps, red: after the last one, blue: what was done.`));
}

const RANK_WORDS = { x: "gone, or named by an incident", e: "waits in the kernel (state D)", t: "stopped", L: "late: the others wait for it", i: "its GPU idles", b: "works", f: "nothing known of its GPU" };
export function rankLetter(rank) {
  if (!rank.alive || rank.named) return "x";
  if (rank.blocked || rank.state === "D") return "e";
  if (rank.state === "T" || rank.state === "t") return "t";
  if (rank.late) return "L";
  return rank.gpu_utilization_ratio === null ? "f" : rank.gpu_utilization_ratio > 0.05 ? "b" : "i";
}

const cell = (letter, words = null) => make("i", { class: `gpu ${letter}`, title: words }, "xetL".includes(letter) ? letter : "");

// How much of the time the others wait and this one does not, of one that is late in words.
const lateness = (rank) => (rank.late ? ` ${Math.round(100 * rank.late_ratio)} % of the time` : "");

// A box a node, a cell a rank.
export function rankGrid(ranks) {
  const nodes = new Map();
  for (const each of ranks) nodes.set(each.node, [...(nodes.get(each.node) || []), each]);
  const boxes = [...nodes].map(([node, some]) => {
    const tally = new Map();
    for (const each of some) tally.set(rankLetter(each), [...(tally.get(rankLetter(each)) || []), each.rank]);
    const label = `${node}: ${[...tally].map(([letter, them]) => `rank ${ranges(them)} ${RANK_WORDS[letter]}`).join("; ")}`;
    return make("a", { class: `node ${tally.has("x") ? "named" : ""}`, href: `#/node/${part(node)}`, "aria-label": label, title: label }, make("span", {}, node),
      make("span", { class: "gpus", "aria-hidden": "true" }, ...some.map((each) => cell(rankLetter(each), `rank ${each.rank}: ${RANK_WORDS[rankLetter(each)]}${rankLetter(each) === "L" ? lateness(each) : ""}${each.blocked ? `, ${each.blocked} for ${seconds(each.blocked_s)}` : ""}`))));
  });
  return [make("div", { class: "map" }, ...boxes), make("ul", { class: "legend" }, ...Object.entries(RANK_WORDS).map(([letter, words]) => make("li", {}, cell(letter), words)))];
}

// Who waits for whom: the groups of ranks that stand alike, with an arrow to the one that is named.
const MOST_GROUPS = 6;
export function whoWaits(diagnosis) {
  const named = new Set((diagnosis?.culprits || []).map((each) => each.rank)), groups = (diagnosis?.groups || []).map((each) => ({ ...each, odd: each.ranks.some((rank) => named.has(rank)) }));
  const odd = groups.filter((each) => each.odd).slice(0, MOST_GROUPS), rest = groups.filter((each) => !each.odd);
  if (!odd.length || !rest.length) return null;
  const shown = rest.slice(0, MOST_GROUPS), more = rest.length - shown.length, rows = Math.max(shown.length, odd.length);
  const who = (each) => plain(`${count(each.ranks.length, "rank")}: ${ranges(each.ranks)}`), where = (each) => plain(each.place || each.frames[0] || "");
  const y = (index, of) => 4 + (index + (rows - of) / 2) * 52;
  const box = (each, x, top) => [rect(x, top, 200, 42, each.odd ? "box odd" : "box", `${who(each)}. ${where(each)}`), text(x + 8, top + 17, short(who(each), 30)), text(x + 8, top + 33, short(where(each), 30))];
  const target = y((odd.length - 1) / 2, odd.length) + 21;
  const label = `${shown.map((each) => `${who(each)} (${where(each)})`).join("; ")}${more ? ` and ${count(more, "more group")}` : ""} wait for ${odd.map((each) => `${who(each)} (${where(each)})`).join("; ")}`;
  return make("figure", {}, drawing(rows * 52 + 16, label, ...shown.flatMap((each, index) => [...box(each, 4, y(index, shown.length)), line(206, y(index, shown.length) + 21, 334, target)]),
    svg("polygon", { points: `336,${target} 326,${target - 5} 326,${target + 5}` }), text(270, target - 12, "wait for", "middle"), ...odd.flatMap((each, index) => box(each, 340, y(index, odd.length))),
    more ? text(4, rows * 52 + 12, `and ${count(more, "more group")}`) : null));
}
