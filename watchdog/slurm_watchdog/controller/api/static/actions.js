// What a person does from the page: the same requests as the commands, which the controller allows or refuses by the same rights.

import { here } from "./dom.js";

// `list`: [label, path, body] each. Nothing where nobody acts from the page.
export function buttons(make, all, list) {
  if (!all.acts_as) return null;
  return make("span", { class: "acts" }, ...list.map(([label, path, body]) => {
    const button = make("button", { type: "button" }, label);
    button.addEventListener("click", () => ask(make, all.acts_as, label, path, body));
    return button;
  }));
}

function ask(make, who, label, path, body) {
  const reason = make("input", { id: "reason", maxlength: 300 }), said = make("p", { role: "alert" });
  const send = make("button", { type: "button" }, label), leave = make("button", { type: "button" }, "Close");
  const dialog = make("dialog", { "aria-label": label }, make("label", { for: "reason" }, `${label}, as ${who}. Why? `), reason, make("p", {}, send, " ", leave), said);
  leave.addEventListener("click", () => dialog.close());
  dialog.addEventListener("close", () => dialog.remove());
  send.addEventListener("click", async () => {
    send.disabled = true;
    try {
      const answer = await post(path, { ...body, reason: reason.value });
      said.textContent = answer.verdict ? `${answer.verdict}: ${answer.reason}` : "Done.";
    } catch (error) {
      said.textContent = error.message;
      send.disabled = false;
      if (error.code === "hangs") [body, send.textContent] = [{ ...body, now: true }, "Requeue it now"];
    }
  });
  document.body.append(dialog);
  dialog.showModal();
}

async function post(path, body) {
  const answer = await fetch(here(path), { method: "POST", body: JSON.stringify(body), signal: AbortSignal.timeout(30000),
    headers: { "Content-Type": "application/json", "X-Slurm-Watchdog-Page": "1" } });
  const document = await answer.json();
  if (!answer.ok) throw Object.assign(new Error(document.error || answer.statusText), { code: document.code });
  return document;
}
