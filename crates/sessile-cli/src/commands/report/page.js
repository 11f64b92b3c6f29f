"use strict";
const started = performance.now();
const data = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const root = document.documentElement;

/* Words and numbers. */
const count = (n) => n === null ? "cannot capture" : n.toLocaleString("en-US").replace(/,/g, "\u202f");
const size = (n) => {
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let at = 0;
  while (n >= 1024 && at < units.length - 1) { n /= 1024; at += 1; }
  return (at ? n.toFixed(n < 10 ? 2 : 1) : n) + "\u202f" + units[at];
};
const element = (tag, text, className) => {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
};

/* Light and dark. */
const prefersDark = window.matchMedia("(prefers-color-scheme: dark)");
let forced = location.hash === "#dark" ? true : location.hash === "#light" ? false : null;
const drawings = [];
let colours = {};
function paint() {
  root.classList.toggle("dark", forced === null ? prefersDark.matches : forced);
  const style = getComputedStyle(root);
  const names = ["ground", "panel", "ink", "soft", "line", "grid", "fence", "wait", "eager", "graphs"];
  colours = Object.fromEntries(names.map((name) => [name, style.getPropertyValue("--" + name).trim()]));
  colours.role = [0, 1, 2, 3, 4, 5, 6, 7].map((n) => style.getPropertyValue("--c" + n).trim());
  drawings.forEach((draw) => draw());
}
prefersDark.addEventListener("change", paint);
$("theme").addEventListener("click", () => { forced = !root.classList.contains("dark"); paint(); });

/* A canvas at the screen's resolution. */
function surface(canvas) {
  const ratio = window.devicePixelRatio || 1;
  const box = canvas.getBoundingClientRect();
  const [width, height] = [Math.max(50, box.width), Math.max(50, box.height)];
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, height);
  pen.font = "12px system-ui, 'DejaVu Sans', sans-serif";
  return { pen, width, height };
}
/* Round steps that cut a span into about `parts`. */
function step(span, parts, base) {
  let unit = 1;
  const grow = base || 10;
  const raw = span / parts;
  while (unit * grow <= raw) unit *= grow;
  while (unit > raw && !base) unit /= 10;
  for (const times of base ? [1, 2, 4, 8, 16, 32, 64, 128, 256, 512] : [1, 2, 5]) if (unit * times >= raw) return unit * times;
  return unit * grow;
}
const tip = $("tip");
function showTip(event, text) {
  tip.hidden = !text;
  if (!text) return;
  tip.textContent = text;
  const [w, h] = [tip.offsetWidth, tip.offsetHeight];
  tip.style.left = Math.max(4, Math.min(event.clientX + 14, window.innerWidth - w - 6)) + "px";
  tip.style.top = Math.max(4, event.clientY + 18 + h > window.innerHeight ? event.clientY - h - 10 : event.clientY + 16) + "px";
}
/* Wheel and drag along the x axis, double click for all, arrow keys likewise. */
function zoomable(canvas, view, left, draw, hover) {
  const clamp = () => {
    const span = Math.min(view.all[1] - view.all[0], Math.max(view.least, view.to - view.from));
    view.from = Math.max(view.all[0], Math.min(view.from, view.all[1] - span));
    view.to = view.from + span;
  };
  const zoom = (factor, at) => {
    const middle = view.from + (view.to - view.from) * at;
    view.from = middle + (view.from - middle) * factor;
    view.to = middle + (view.to - middle) * factor;
    clamp(); draw();
  };
  const share = (event) => {
    const box = canvas.getBoundingClientRect();
    return Math.min(1, Math.max(0, (event.clientX - box.left - left()) / Math.max(1, box.width - left() - 16)));
  };
  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    zoom(Math.exp(event.deltaY / 400), share(event));
  }, { passive: false });
  let grip = null;
  canvas.addEventListener("pointerdown", (event) => { grip = [share(event), view.from, view.to]; canvas.setPointerCapture(event.pointerId); });
  canvas.addEventListener("pointerup", () => { grip = null; });
  canvas.addEventListener("pointermove", (event) => {
    if (grip) {
      const moved = (grip[0] - share(event)) * (grip[2] - grip[1]);
      view.from = grip[1] + moved; view.to = grip[2] + moved;
      clamp(); draw(); showTip(event, "");
    } else hover(event);
  });
  canvas.addEventListener("pointerleave", (event) => { showTip(event, ""); hover(null); });
  canvas.addEventListener("dblclick", () => { [view.from, view.to] = view.all; draw(); });
  canvas.addEventListener("keydown", (event) => {
    const span = view.to - view.from;
    const move = { ArrowLeft: -0.2, ArrowRight: 0.2 }[event.key];
    if (move) { view.from += move * span; view.to += move * span; clamp(); draw(); }
    else if (event.key === "+" || event.key === "=") zoom(0.7, 0.5);
    else if (event.key === "-") zoom(1 / 0.7, 0.5);
    else return;
    event.preventDefault();
  });
}

/* Head. */
document.title = "sessile: " + data.title;
$("title").textContent = data.title;
const depthOf = Object.entries(data.depth_by_group).map(([group, depth]) => group + " " + depth);
$("facts").textContent = [
  data.source,
  "strategy " + data.strategy,
  "depth " + data.depth + (depthOf.length ? " (" + depthOf.join(", ") + ")" : ""),
  "step cut " + data.step_cut,
  count(data.requests.length) + " requests",
  count(data.fences.length) + " fences",
  "plan " + data.plan_digest.slice(0, 16),
].join(" · ");

/* Arena map. */
const launches = data.launches ? data.launches.order.length : data.requests.length;
const runnerAt = (at) => data.launches ? data.launches.runners[data.launches.order[at]] : undefined;
const waitsFor = new Map(), waitedBy = new Map();
for (const [release, acquire] of data.fences) {
  (waitsFor.get(acquire) || waitsFor.set(acquire, []).get(acquire)).push(release);
  (waitedBy.get(release) || waitedBy.set(release, []).get(release)).push(acquire);
}
let arena = 0, hot = -1;
const map = { all: [0, Math.max(1, launches)], from: 0, to: Math.max(1, launches), least: Math.min(1, launches) };
const MAP_LEFT = 84, MAP_FOOT = 24, MAP_HEAD = 10;
function mapBox(width, height) {
  const bytes = Math.max(1, data.arenas[arena] ? data.arenas[arena].bytes : 1);
  return {
    x: (at) => MAP_LEFT + (at - map.from) / (map.to - map.from) * (width - MAP_LEFT - 16),
    y: (address) => MAP_HEAD + (1 - address / bytes) * (height - MAP_HEAD - MAP_FOOT),
    bytes,
  };
}
function drawMap() {
  const { pen, width, height } = surface($("map"));
  const box = mapBox(width, height);
  const bottom = height - MAP_FOOT;
  pen.fillStyle = colours.soft; pen.strokeStyle = colours.grid; pen.lineWidth = 1;
  pen.textAlign = "right"; pen.textBaseline = "middle";
  const rise = step(box.bytes, 6, 1024);
  for (let at = 0; at <= box.bytes; at += rise) {
    const y = Math.round(box.y(at)) + 0.5;
    pen.beginPath(); pen.moveTo(MAP_LEFT, y); pen.lineTo(width - 16, y); pen.stroke();
    pen.fillText(size(at), MAP_LEFT - 8, y);
  }
  pen.textAlign = "center"; pen.textBaseline = "alphabetic";
  const stride = Math.max(1, step(map.to - map.from, 10));
  for (let at = Math.ceil(map.from / stride) * stride; at <= map.to; at += stride) {
    const x = Math.round(box.x(at)) + 0.5;
    pen.beginPath(); pen.moveTo(x, bottom); pen.lineTo(x, bottom + 4); pen.stroke();
    pen.fillText(at, x, height - 7);
  }
  pen.save();
  pen.beginPath(); pen.rect(MAP_LEFT, 0, width - MAP_LEFT - 16, bottom); pen.clip();
  const draw = (request, index) => {
    if (request.arena !== arena) return;
    const [top, low] = [box.y(request.offset + request.bytes), box.y(request.offset)];
    for (const [from, to] of request.lives) {
      if (to < map.from || from > map.to) continue;
      const [x0, x1] = [box.x(from), box.x(to)];
      const w = Math.max(0.8, x1 - x0 - (x1 - x0 > 3 ? 0.6 : 0)), h = Math.max(0.8, low - top - (low - top > 3 ? 0.6 : 0));
      pen.fillRect(x0, top, w, h);
      if (index === hot) pen.strokeRect(x0 + 1, top + 1, Math.max(1, w - 2), Math.max(1, h - 2));
    }
  };
  pen.lineWidth = 2;
  data.requests.forEach((request, index) => {
    const near = hot >= 0 && index !== hot && !(waitsFor.get(hot) || []).includes(index) && !(waitedBy.get(hot) || []).includes(index);
    pen.globalAlpha = near ? 0.35 : 0.88;
    pen.fillStyle = colours.role[request.role % 8]; pen.strokeStyle = colours.ink;
    draw(request, index);
  });
  pen.globalAlpha = 1;
  if (hot >= 0) {
    const middle = (index) => {
      const request = data.requests[index];
      return box.y(request.offset + request.bytes / 2);
    };
    pen.strokeStyle = colours.fence; pen.lineWidth = 1.6;
    const arrow = (release, acquire) => {
      const [a, b] = [data.requests[release], data.requests[acquire]];
      if (a.arena !== arena || b.arena !== arena) return;
      for (const [, end] of a.lives) {
        const next = b.lives.map((life) => life[0]).filter((begin) => begin >= end - 1e-9).sort((m, n) => m - n)[0];
        if (next === undefined) continue;
        const [x0, y0, x1, y1] = [box.x(end), middle(release), box.x(next), middle(acquire)];
        pen.beginPath(); pen.moveTo(x0, y0); pen.lineTo(x1, y1); pen.stroke();
        pen.beginPath(); pen.arc(x1, y1, 3, 0, 7); pen.stroke();
      }
    };
    (waitsFor.get(hot) || []).forEach((release) => arrow(release, hot));
    (waitedBy.get(hot) || []).forEach((acquire) => arrow(hot, acquire));
  }
  pen.restore();
}
function describe(request, index) {
  const lives = request.lives.slice(0, 3).map(([from, to]) => {
    const at = Math.floor(from);
    return "launch " + from.toFixed(2) + " to " + to.toFixed(2) + (runnerAt(at) ? " (from " + runnerAt(at) + ")" : "");
  });
  const names = (list) => list.slice(0, 3).map((at) => data.requests[at].name).join("\n   ") + (list.length > 3 ? "\n   and " + (list.length - 3) + " more" : "");
  const lines = [
    request.name,
    data.roles[request.role] + (request.dtype ? ", " + request.dtype + "[" + request.shape.join(", ") + "]" : ""),
    count(request.offset) + " to " + count(request.offset + request.bytes) + " (" + size(request.bytes) + ")",
    data.launches ? "lives " + lives.join("; ") + (request.lives.length > 3 ? "; …" : "") : "",
  ];
  const [before, after] = [waitsFor.get(index), waitedBy.get(index)];
  if (before) lines.push("fence: waits for\n   " + names(before));
  if (after) lines.push("fence: waited for by\n   " + names(after));
  return lines.filter(Boolean).join("\n");
}
zoomable($("map"), map, () => MAP_LEFT, drawMap, (event) => {
  const before = hot;
  hot = -1;
  if (event) {
    const box = $("map").getBoundingClientRect();
    const { x, y } = mapBox(box.width, box.height);
    const [px, py] = [event.clientX - box.left, event.clientY - box.top];
    data.requests.forEach((request, index) => {
      if (request.arena !== arena || py < y(request.offset + request.bytes) - 0.5 || py > y(request.offset) + 0.5) return;
      if (request.lives.some(([from, to]) => px >= x(from) - 0.5 && px <= Math.max(x(to), x(from) + 1) + 0.5)) hot = index;
    });
    showTip(event, hot >= 0 ? describe(data.requests[hot], hot) : "");
  }
  if (hot !== before) drawMap();
});
data.arenas.forEach((one, at) => {
  const button = element("button", one.domain + ": " + count(one.bytes) + " bytes");
  button.type = "button"; button.setAttribute("role", "tab");
  button.dataset.bytes = one.bytes;
  button.addEventListener("click", () => {
    arena = at; hot = -1;
    for (const [other, tab] of [...$("arenas").children].entries()) tab.setAttribute("aria-selected", other === at);
    drawMap();
  });
  button.setAttribute("aria-selected", at === 0);
  $("arenas").append(button);
});
$("map-note").textContent = (data.launches
  ? "Address upwards, launches of a step to the right; a block lasts from a buffer's first write to its last read."
  : "No trace was given (--trace FILE): requests stand side by side, in order of their number.")
  + " Hover for weight, role, lifetime and fences; wheel or +/- zooms, drag or arrows move, double click shows all.";
data.roles.forEach((role, at) => {
  const entry = element("span"), square = element("i");
  square.style.background = "var(--c" + at % 8 + ")";
  entry.append(square, role);
  $("legend").append(entry);
});
drawings.push(drawMap);

/* Timeline. */
if (data.order && data.order.slices.length) {
  const order = data.order;
  const end = order.slices.reduce((last, slice) => Math.max(last, slice.end), 1);
  const view = { all: [0, end], from: 0, to: Math.min(end, 120), least: Math.min(end, 8) };
  const LEFT = 168, FOOT = 24, HEAD = 8;
  const groups = [...new Set(order.slices.map((slice) => slice.group).filter(Boolean))];
  const laneOrder = order.lanes.map((name, at) => [name, at]).sort((a, b) => a[0] < b[0] ? -1 : 1).map(([, at]) => at);
  const row = []; laneOrder.forEach((lane, at) => { row[lane] = at; });
  $("order").style.height = Math.max(140, HEAD + FOOT + order.lanes.length * 40) + "px";
  const place = (width, height) => {
    const lane = (height - HEAD - FOOT) / order.lanes.length;
    return { lane, x: (at) => LEFT + (at - view.from) / (view.to - view.from) * (width - LEFT - 16), y: (at) => HEAD + row[at] * lane };
  };
  const colour = (slice) => slice.kind === "wait" ? colours.wait : slice.kind === "work" ? colours.role[7] : colours.role[groups.indexOf(slice.group) % 7];
  const draw = () => {
    const { pen, width, height } = surface($("order"));
    const { lane, x, y } = place(width, height);
    pen.textBaseline = "middle"; pen.textAlign = "right"; pen.fillStyle = colours.soft; pen.strokeStyle = colours.grid;
    order.lanes.forEach((name, at) => {
      pen.fillText(name, LEFT - 10, y(at) + lane / 2);
      pen.beginPath(); pen.moveTo(LEFT, Math.round(y(at) + lane) + 0.5); pen.lineTo(width - 8, Math.round(y(at) + lane) + 0.5); pen.stroke();
    });
    pen.textAlign = "center";
    const stride = Math.max(1, step(view.to - view.from, 10));
    for (let at = Math.ceil(view.from / stride) * stride; at <= view.to; at += stride) pen.fillText(at, x(at), height - 9);
    pen.save();
    pen.beginPath(); pen.rect(LEFT, 0, width - LEFT - 16, height - FOOT); pen.clip();
    for (const slice of order.slices) {
      if (slice.end < view.from || slice.begin > view.to) continue;
      pen.fillStyle = colour(slice);
      pen.globalAlpha = slice.launch % 2 ? 0.75 : 1;
      pen.fillRect(x(slice.begin) + 0.5, y(slice.lane) + 5, Math.max(1, x(slice.end) - x(slice.begin) - 1), lane - 10);
    }
    pen.globalAlpha = 1; pen.strokeStyle = colours.fence; pen.lineWidth = 1.3;
    for (const [from, when, to, at] of order.arrows) {
      if (at < view.from || when > view.to) continue;
      const [x0, y0, x1, y1] = [x(when), y(from) + lane / 2, x(at), y(to) + lane / 2];
      pen.beginPath(); pen.moveTo(x0, y0); pen.bezierCurveTo(x0 + 12, y0, x1 - 12, y1, x1, y1); pen.stroke();
      pen.beginPath(); pen.arc(x1, y1, 2.4, 0, 7); pen.stroke();
    }
    pen.restore();
  };
  zoomable($("order"), view, () => LEFT, draw, (event) => {
    if (!event) return;
    const box = $("order").getBoundingClientRect();
    const { lane, x, y } = place(box.width, box.height);
    const [px, py] = [event.clientX - box.left, event.clientY - box.top];
    const found = order.slices.find((slice) => px >= x(slice.begin) && px <= x(slice.end) && py >= y(slice.lane) && py <= y(slice.lane) + lane);
    showTip(event, found ? runnerAt(found.launch) + "\n" + (found.group ? "collective of " + found.group : found.kind === "wait" ? "waits for a fence, " + (found.end - found.begin) + " units" : "operations") : "");
  });
  const some = order.shown < order.launches ? " The first " + count(order.shown) + " of " + count(order.launches) + " launches." : "";
  $("order-note").textContent = "The recorded order: each piece of work takes one unit and begins when all before it has ended. Collectives by group in colour, operations grey, waits for fences pale red, fences as lines from release to acquire." + some;
  drawings.push(draw);
} else $("order-section").hidden = true;

/* Losses. */
if (data.run && data.run.steps.length > 1) {
  const steps = data.run.steps;
  const values = steps.flatMap((one) => [one.eager, one.graphs]).filter((value) => value !== null);
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const draw = () => {
    const { pen, width, height } = surface($("loss"));
    const [left, foot] = [56, 26];
    const first = steps[0].step, last = steps[steps.length - 1].step;
    const x = (at) => left + (at - first) / Math.max(1, last - first) * (width - left - 14);
    const y = (value) => 12 + (high - value) / Math.max(1e-9, high - low) * (height - 12 - foot);
    pen.strokeStyle = colours.grid; pen.fillStyle = colours.soft; pen.textAlign = "right"; pen.textBaseline = "middle";
    const rise = step(Math.max(1e-9, high - low), 5);
    for (let value = Math.ceil(low / rise) * rise; value <= high + 1e-12; value += rise) {
      pen.beginPath(); pen.moveTo(left, y(value)); pen.lineTo(width - 14, y(value)); pen.stroke();
      pen.fillText(Number(value.toPrecision(6)), left - 8, y(value));
    }
    pen.textAlign = "center";
    const stride = Math.max(1, step(last - first || 1, 10));
    for (let at = Math.ceil(first / stride) * stride; at <= last; at += stride) pen.fillText(at, x(at), height - 10);
    const line = (name, thick, dash) => {
      pen.strokeStyle = colours[name]; pen.lineWidth = thick; pen.setLineDash(dash); pen.lineJoin = "round";
      pen.beginPath();
      let down = false;
      for (const one of steps) {
        if (one[name] === null) { down = false; continue; }
        if (down) pen.lineTo(x(one.step), y(one[name])); else pen.moveTo(x(one.step), y(one[name]));
        down = true;
      }
      pen.stroke(); pen.setLineDash([]);
    };
    line("eager", 6, []);
    line("graphs", 1.8, []);
    pen.textAlign = "left"; pen.lineWidth = 6;
    [["eager", 6], ["graphs", 1.8]].forEach(([name, thick], at) => {
      const top = 20 + at * 18;
      pen.strokeStyle = colours[name]; pen.lineWidth = thick; pen.beginPath(); pen.moveTo(width - 118, top); pen.lineTo(width - 88, top); pen.stroke();
      pen.fillStyle = colours.ink; pen.fillText(name, width - 80, top);
    });
  };
  const bits = data.run.equal_bits;
  $("loss-note").textContent = "Mean loss by step, eager execution under replayed graphs. " + (bits === null ? "Only one was made." : bits ? "All bits of losses and gradients are equal." : "Bits differ.");
  drawings.push(draw);
} else $("loss-section").hidden = true;

/* Memory. */
{
  const most = Math.max(...data.memory.map((row) => row.bytes || 0), 1);
  const head = element("tr");
  head.append(element("th", "strategy"), element("th", "bytes", "n"), element("th", "to this plan", "n"), element("th", ""));
  $("memory").append(head);
  data.memory.forEach((row, at) => {
    const line = element("tr", undefined, at === 0 ? "mine" : "");
    const bytes = element("td", count(row.bytes), "n");
    if (row.bytes !== null) bytes.dataset.value = row.bytes;
    bytes.dataset.name = row.name;
    const cell = element("td", undefined, "bar"), bar = element("span", undefined, "bar");
    bar.style.width = 100 * (row.bytes || 0) / most + "%";
    cell.append(bar);
    line.append(element("td", row.name), bytes, element("td", row.bytes === null || !data.bytes ? "" : (row.bytes / data.bytes).toFixed(2) + "×", "n"), cell);
    $("memory").append(line);
  });
}

/* Depth. */
if (data.depths.length) {
  const timed = data.depths.every((row) => row.exposed_fraction !== null);
  const head = element("tr");
  ["depth", "bytes", "lower bound", "fences"].concat(timed ? ["exposed %"] : []).forEach((name, at) => head.append(element("th", name, at ? "n" : "")));
  $("depths").append(head);
  for (const row of data.depths) {
    const line = element("tr", undefined, row.shown ? "mine" : "");
    const bytes = element("td", count(row.bytes), "n");
    bytes.dataset.value = row.bytes; bytes.dataset.name = "depth " + row.name;
    line.append(element("td", row.name + (row.shown ? " ← this plan" : "")), bytes, element("td", count(row.lower_bound_bytes), "n"), element("td", count(row.fences), "n"));
    if (timed) line.append(element("td", (100 * row.exposed_fraction).toFixed(2), "n"));
    $("depths").append(line);
  }
  drawings.push(() => {
    const { pen, width, height } = surface($("depth"));
    const [left, foot] = [76, 38];
    const xs = data.depths.map((row, at) => timed ? 100 * row.exposed_fraction : at);
    const most = Math.max(...data.depths.map((row) => row.bytes), 1);
    // Depths that expose the same still get an axis with different numbers.
    const middle = (Math.min(...xs) + Math.max(...xs)) / 2, half = Math.max((Math.max(...xs) - Math.min(...xs)) / 2, 0.05);
    const [low, high] = [Math.max(middle - half, 0), middle + half];
    const x = (value) => left + 24 + (value - low) / Math.max(1e-9, high - low) * (width - left - 62);
    const y = (bytes) => height - foot - bytes / most * (height - foot - 30);
    pen.strokeStyle = colours.grid; pen.fillStyle = colours.soft; pen.textAlign = "right"; pen.textBaseline = "middle";
    const rise = step(most, 4, 1024);
    for (let at = 0; at <= most; at += rise) {
      pen.beginPath(); pen.moveTo(left, y(at)); pen.lineTo(width - 12, y(at)); pen.stroke();
      pen.fillText(size(at), left - 8, y(at));
    }
    pen.textAlign = "center";
    if (timed) {
      pen.fillText("exposed communication, % of the time", (left + width) / 2, height - 8);
      const stride = step(Math.max(1e-9, high - low), 6);
      for (let at = Math.ceil(low / stride) * stride; at <= high + 1e-9; at += stride) pen.fillText(Number(at.toPrecision(4)), x(at), height - foot + 12);
    } else {
      pen.fillText("depth", (left + width) / 2, height - 8);
      data.depths.forEach((row, at) => pen.fillText(row.name, x(at), height - foot + 12));
    }
    const dots = (key, colour, filled) => data.depths.forEach((row, at) => {
      pen.strokeStyle = pen.fillStyle = colour; pen.lineWidth = 2;
      pen.beginPath(); pen.arc(x(xs[at]), y(row[key]), row.shown && filled ? 7 : 4, 0, 7);
      if (filled) pen.fill(); else pen.stroke();
    });
    if (!timed) {
      pen.strokeStyle = colours.role[0]; pen.lineWidth = 2; pen.beginPath();
      data.depths.forEach((row, at) => at ? pen.lineTo(x(at), y(row.bytes)) : pen.moveTo(x(at), y(row.bytes)));
      pen.stroke();
    }
    dots("bytes", colours.role[0], true);
    dots("lower_bound_bytes", colours.role[1], false);
    pen.textAlign = "left";
    [["bytes", 0], ["lower bound", 1]].forEach(([name, at]) => {
      pen.fillStyle = colours.role[at]; pen.fillRect(left + 14 + at * 84, 4, 9, 9);
      pen.fillStyle = colours.ink; pen.fillText(name, left + 28 + at * 84, 9);
    });
  });
} else $("depth-section").hidden = true;

/* Checks. */
{
  const rows = [["the plan's validator", data.findings.length + data.unlisted, "findings", true]];
  const run = data.run;
  if (run) {
    if (run.violations !== null) rows.push(["happens-before checker, of " + count(run.operations) + " operations", run.violations, "violations", true]);
    if (run.equal_bits !== null) rows.push(["bits of eager execution and replay", run.equal_bits ? "equal" : "differ", "", null]);
    if (run.replays !== null) rows.push(["graph launches", run.replays, "", false]);
    if (run.order_deviations !== null) rows.push(["launches outside the sealed order", run.order_deviations, "", false]);
    if (run.cross_runner_pairs !== null) rows.push(["pairs of operations of different runners at once", run.cross_runner_pairs, "", false]);
    if (run.sharing_arena !== null) rows.push(["of them on one arena", run.sharing_arena, "", false]);
  }
  for (const [name, value, what, judged] of rows) {
    const line = element("tr");
    const good = judged === null ? value === "equal" : value === 0;
    const cell = element("td", (typeof value === "number" ? count(value) : value) + (what ? " " + what : ""), "n " + (judged === false ? "" : good ? "good" : "bad"));
    cell.dataset.value = value; cell.dataset.name = name;
    line.append(element("td", name), cell);
    $("checks").append(line);
  }
  for (const finding of data.findings) $("findings").append(element("li", finding, "bad"));
  if (data.unlisted) $("findings").append(element("li", "and " + count(data.unlisted) + " more"));
}

paint();
new ResizeObserver(() => drawings.forEach((draw) => draw())).observe(document.querySelector("main"));
document.body.dataset.ready = Math.round(performance.now() - started);
