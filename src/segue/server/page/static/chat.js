// The chat: what is typed goes to the session at once, so that it is computed before Enter.

import { Session, key } from "./session.js";

const $ = (id) => document.getElementById(id);
const input = $("input");
const log = $("log");

let session;
let sent = ""; // what the session has of the input
let answer = null; // the one that is being given
let sendNext = false; // Enter was pressed during an answer, which is cut off first
let pressedMs = 0;
let isForgotten = false; // the session has timed out, and another one takes its place

// --- input

function typed() {
  const text = input.value;
  if (text === sent) return;
  if (text.startsWith(sent)) session.send("input_text.append", { text: text.slice(sent.length) });
  else session.send("input_text.revise", { text });
  sent = text;
  if (!text) showProgress(0, 0);
}

function showProgress(numComputed, numTokens) {
  // The last token is computed with the first step of the answer.
  const whole = Math.max(numTokens - 1, 0);
  $("progress").max = Math.max(whole, 1);
  $("progress").value = Math.min(numComputed, whole);
  $("progress-text").textContent = numTokens
    ? `${Math.min(numComputed, whole)} of ${whole} tokens computed`
    : "nothing to compute yet";
}

function send() {
  if (!input.value.trim()) return;
  typed();
  $("problem").textContent = "";
  if (answer) {
    sendNext = true;
    interrupt();
    return;
  }
  sendNext = false;
  pressedMs = performance.now();
  session.send("response.create", { response: settings() });
  input.value = sent = "";
  showProgress(0, 0);
}

function interrupt() {
  if (answer) session.send("response.cancel");
}

function settings() {
  const fields = {};
  const numbers = { temperature: "temperature", max_output_tokens: "longest", seed: "seed" };
  for (const [name, id] of Object.entries(numbers)) {
    if ($(id).value !== "") fields[name] = Number($(id).value);
  }
  return fields;
}

// --- messages

function addMessage(item, text) {
  const line = document.createElement("li");
  line.className = item.role;
  const who = document.createElement("span");
  who.className = "who";
  who.textContent = item.role === "user" ? "You" : "Model";
  const body = document.createElement("span");
  body.className = "text";
  body.textContent = text;
  line.append(who, body);
  log.append(line);
  follow();
  return { line, body };
}

function follow() {
  log.scrollTop = log.scrollHeight;
}

function began(event) {
  answer = { ...addMessage(event.item, ""), pending: "", firstMs: null, startedMs: pressedMs };
  answer.body.setAttribute("aria-busy", "true");
  $("stop").disabled = false;
  $("announcement").textContent = "The model answers";
}

function grew(event) {
  const now = performance.now();
  if (answer.firstMs === null) {
    answer.firstMs = now;
    $("ttft").textContent = `${Math.round(now - answer.startedMs)} ms`;
  }
  // Drawn once a frame, however fast the tokens come.
  if (!answer.pending) requestAnimationFrame(draw);
  answer.pending += event.delta;
}

function draw() {
  if (!answer?.pending) return;
  answer.body.append(answer.pending);
  answer.body.normalize();
  answer.pending = "";
  follow();
}

function ended({ response }) {
  draw();
  const { line, body, firstMs, startedMs } = answer;
  body.removeAttribute("aria-busy");
  const numTokens = response.usage.output_tokens;
  const notes = [`${numTokens} tokens`];
  if (firstMs !== null) {
    const seconds = (performance.now() - firstMs) / 1000;
    notes.push(`first after ${Math.round(firstMs - startedMs)} ms`);
    if (numTokens > 1 && seconds > 0) {
      $("rate").textContent = `${((numTokens - 1) / seconds).toFixed(1)} tokens/s`;
      notes.push($("rate").textContent);
    }
  }
  if (response.status !== "completed") notes.push(response.status_details?.reason ?? response.status);
  if (response.status === "failed") $("problem").textContent = response.status_details.error.message;
  const note = document.createElement("span");
  note.className = "note";
  note.textContent = notes.join(" · ");
  line.append(note);
  $("announcement").textContent =
    (response.status === "cancelled" ? "Interrupted: " : "") + body.textContent;
  $("stop").disabled = true;
  answer = null;
  follow();
  if (sendNext) send();
}

// --- events

function received(event) {
  switch (event.type) {
    case "session.created":
      $("model").textContent = event.session.model;
      if ($("instructions").value) setInstructions();
      if (isForgotten) {
        isForgotten = false;
        sent = "";
        typed();
      }
      break;
    case "conversation.item.done":
      if (event.item.role === "user") addMessage(event.item, event.item.content[0].text);
      break;
    case "input_text.progress":
      if (input.value) showProgress(event.num_computed, event.num_tokens);
      break;
    case "response.output_item.added":
      began(event);
      break;
    case "response.output_text.delta":
      grew(event);
      break;
    case "response.done":
      ended(event);
      break;
    case "error":
      failed(event.error);
      break;
  }
}

function failed(error) {
  if (error.code === "response_cancel_not_active") return; // it had just ended
  if (error.code === "session_not_found") {
    isForgotten = true;
    if (answer) answer.body.removeAttribute("aria-busy");
    answer = null;
  }
  $("problem").textContent = error.message;
}

function setInstructions() {
  session.send("session.update", {
    session: { type: "realtime", instructions: $("instructions").value },
  });
}

function askForKey() {
  const dialog = $("key-dialog");
  if (!dialog.open) dialog.showModal();
  return new Promise((resolve) => {
    dialog.onclose = () => {
      key.set($("key").value);
      resolve();
    };
  });
}

function open() {
  session?.end();
  log.replaceChildren();
  sent = "";
  answer = null;
  sendNext = false;
  session = new Session({
    event: received,
    state: (state) => {
      $("connection").textContent = state === "open" ? "connected" : "connection lost, trying again…";
      $("connection").dataset.state = state;
    },
    needsKey: askForKey,
  });
  typed();
}

input.addEventListener("input", typed);
input.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") interrupt();
});
$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
  input.focus();
});
$("settings").addEventListener("submit", (event) => event.preventDefault());
$("stop").addEventListener("click", () => {
  interrupt();
  input.focus();
});
$("new").addEventListener("click", () => {
  open();
  input.focus();
});
$("instructions").addEventListener("change", setInstructions);

open();
