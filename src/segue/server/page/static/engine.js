// The view of the engine: numbers, requests, and a map of the KV blocks.

import { key } from "./session.js";

const PERIOD_MS = 250;
const CELL = 8; // pixels, with the gap
const GAP = 1;
const GOLDEN_ANGLE = 137.508; // neighbouring requests get colours that are far apart

const $ = (id) => document.getElementById(id);
const hues = new Map(); // by request
let last = null; // the view before, and when it came

function hueOf(requestId) {
  if (!hues.has(requestId)) hues.set(requestId, (hues.size * GOLDEN_ANGLE) % 360);
  return hues.get(requestId);
}

function colours() {
  const style = getComputedStyle(document.documentElement);
  const named = (name) => style.getPropertyValue(name).trim();
  const lightness = named("--lightness");
  return {
    free: named("--free"),
    cached: named("--cached"),
    held: (id) => `hsl(${hueOf(id)} 70% ${lightness})`,
  };
}

function drawMap(numBlocks, snapshot, colour) {
  const canvas = $("map");
  const columns = Math.max(1, Math.floor(canvas.clientWidth / CELL));
  const rows = Math.ceil(numBlocks / columns);
  const scale = window.devicePixelRatio || 1;
  const [width, height] = [columns * CELL, rows * CELL];
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
    canvas.style.height = `${(height * canvas.clientWidth) / width}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  const fill = (block) => {
    const [x, y] = [block % columns, Math.floor(block / columns)];
    context.fillRect(x * CELL, y * CELL, CELL - GAP, CELL - GAP);
  };
  context.fillStyle = colour.free;
  for (let block = 0; block < numBlocks; block++) fill(block);
  context.fillStyle = colour.cached;
  snapshot.cached_blocks.forEach(fill);
  for (const request of snapshot.requests) {
    context.fillStyle = colour.held(request.request_id);
    request.blocks.forEach(fill);
  }
}

function listRequests(requests, colour) {
  const rows = requests.map((request) => {
    const row = document.createElement("tr");
    const name = document.createElement("td");
    const swatch = document.createElement("span");
    swatch.className = "swatch";
    swatch.style.background = colour.held(request.request_id);
    name.append(swatch, request.request_id);
    row.append(name);
    for (const text of [
      request.state,
      `${request.num_computed}/${request.num_tokens}`,
      request.blocks.length,
    ]) {
      const cell = document.createElement("td");
      cell.textContent = text;
      row.append(cell);
    }
    return row;
  });
  $("requests").replaceChildren(...rows);
}

function showNumbers({ stats }) {
  const texts = {
    running: stats.num_running,
    waiting: stats.num_waiting,
    idle: stats.num_idle,
    preemptions: stats.num_preemptions,
    acceptance: stats.num_draft_tokens
      ? `${((100 * stats.num_accepted_tokens) / stats.num_draft_tokens).toFixed(0)} %`
      : "no drafts",
  };
  const nowMs = performance.now();
  if (last && stats.num_computed_tokens >= last.numComputed) {
    const perSecond = ((stats.num_computed_tokens - last.numComputed) * 1000) / (nowMs - last.ms);
    texts.throughput = `${perSecond.toFixed(0)} tokens/s computed`;
  }
  last = { numComputed: stats.num_computed_tokens, ms: nowMs };
  for (const [id, text] of Object.entries(texts)) $(id).textContent = text;
}

function showBlocks({ stats, snapshot, block_size: blockSize }) {
  const numHeld = stats.num_kv_blocks - stats.num_free_blocks;
  const numFree = stats.num_free_blocks - stats.num_cached_blocks;
  $("map-text").textContent =
    `${stats.num_kv_blocks} blocks of ${blockSize} tokens: ${numHeld} held, ` +
    `${stats.num_cached_blocks} cached, ${numFree} free`;
  const known = new Set(snapshot.requests.map((request) => request.request_id));
  for (const id of hues.keys()) if (hues.size > 1000 && !known.has(id)) hues.delete(id);
  const colour = colours();
  drawMap(stats.num_kv_blocks, snapshot, colour);
  listRequests(snapshot.requests, colour);
}

async function look() {
  try {
    const response = await fetch("/engine", { headers: key.headers() });
    if (response.ok) {
      const view = await response.json();
      const state = { running: "", restarting: "The engine is being started again.", dead: "The engine is gone." };
      if ($("engine-state").textContent !== state[view.engine]) {
        $("engine-state").textContent = state[view.engine];
      }
      if (view.stats) {
        showNumbers(view);
        showBlocks(view);
      }
    }
  } catch {
    // The server is away; the chat says so.
  }
}

async function watch() {
  if (!document.hidden) await look();
  setTimeout(watch, PERIOD_MS);
}

watch();
