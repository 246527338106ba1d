"use strict";

const SAMPLES = 120; // half a second each: one minute
const POLL_MS = 500;
const SPEED_FROM = 20; // tokens: the speed of fewer says nothing
const find = (id) => document.getElementById(id);
const pictures = []; // {name, url} with data URLs
const running = new Set(); // AbortControllers
const history = [];

/** Streams at a time; one connection of the browser's six is left for the charts. */
const connections = {
  free: 5,
  queue: [],
  take(signal) {
    if (this.free > 0) {
      this.free -= 1;
      return Promise.resolve();
    }
    return new Promise((resolve, reject) => {
      this.queue.push(resolve);
      signal.addEventListener("abort", () => {
        const place = this.queue.indexOf(resolve);
        if (place < 0) return;
        this.queue.splice(place, 1);
        reject(new DOMException("stopped", "AbortError"));
      });
    });
  },
  give() {
    const next = this.queue.shift();
    if (next) next();
    else this.free += 1;
  },
};

// ---- the server ----

function headers() {
  const key = sessionStorage.getItem("key");
  return key ? { Authorization: `Bearer ${key}` } : {};
}

async function ask(path, options = {}) {
  const response = await fetch(path, { ...options, headers: { ...headers(), ...options.headers } });
  if (response.status === 401) find("key-row").hidden = false;
  if (!response.ok) throw new Error(await reason(response));
  return response;
}

async function reason(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the server answered ${response.status}`;
  }
}

/** The payloads of server-sent events, parsed. */
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    held += value;
    const parts = held.split("\n\n");
    held = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

// ---- the batch ----

async function poll() {
  if (!document.hidden) {
    try {
      const now = await (await ask("stats")).json();
      find("model").textContent = `${now.model}: ${now.status}`;
      const before = history.at(-1);
      const batch = now.batch ?? {};
      history.push({
        decoding: batch.decoding ?? 0,
        prefilling: batch.prefilling ?? 0,
        waiting: (batch.waiting ?? 0) + (batch.queued ?? 0),
        kv: batch.kv_bytes ?? 0,
        cached: batch.cached_tokens ?? 0,
        generated: batch.generated_tokens ?? 0,
        at: performance.now(),
      });
      const last = history.at(-1);
      last.speed = before ? Math.max(0, ((last.generated - before.generated) * 1000) / (last.at - before.at)) : 0;
      last.hits = before ? Math.max(0, last.cached - before.cached) : 0;
      if (history.length > SAMPLES) history.shift();
      draw();
    } catch (error) {
      find("model").textContent = error.message;
    }
  }
  setTimeout(poll, POLL_MS);
}

function draw() {
  const last = history.at(-1);
  bars("rows", ["decoding", "prefilling", "waiting"]);
  bars("speed", ["speed"]);
  bars("kv", ["kv"]);
  bars("cache", ["hits"]);
  find("rows-now").textContent = `${last.decoding} + ${last.prefilling} + ${last.waiting}`;
  find("speed-now").textContent = last.speed.toFixed(0);
  find("kv-now").textContent = bytes(last.kv);
  find("cache-now").textContent = last.cached.toLocaleString();
}

/** Stacked bars, one for each sample, newest at the right. */
function bars(id, names) {
  const top = Math.max(1e-9, ...history.map((one) => names.reduce((sum, name) => sum + one[name], 0)));
  const shapes = [];
  history.forEach((one, index) => {
    let y = 32;
    const x = SAMPLES - history.length + index;
    for (const name of names) {
      const height = (31 * one[name]) / top;
      if (!height) continue;
      y -= height;
      const bar = document.createElementNS("http://www.w3.org/2000/svg", "rect");
      const kind = names.length > 1 ? name : "line";
      for (const [key, value] of Object.entries({ x, y, width: 1, height, class: kind })) bar.setAttribute(key, value);
      shapes.push(bar);
    }
  });
  find(id).replaceChildren(...shapes);
}

function bytes(count) {
  const units = ["B", "KB", "MB", "GB"];
  let unit = 0;
  while (count >= 1000 && unit < 3) [count, unit] = [count / 1000, unit + 1];
  return `${count.toFixed(unit && count < 100 ? 1 : 0)} ${units[unit]}`;
}

// ---- pictures ----

function addFiles(files) {
  const refused = [];
  for (const file of files) {
    const why = whyNot(file);
    if (why) {
      refused.push(`${file.name || "the file"} ${why}`);
      continue;
    }
    const reader = new FileReader();
    reader.onload = () => {
      pictures.push({ name: file.name || "pasted picture", url: reader.result });
      showPictures();
    };
    reader.onerror = () => {
      find("problem").textContent = `${file.name} cannot be read: ${reader.error.message}`;
    };
    reader.readAsDataURL(file);
  }
  find("problem").textContent = refused.join("; ");
}

/** Names of pictures to which browsers give no type; the server goes by what they hold. */
const PICTURE = /\.(hei[cf]|hif|avif|jp2|j2k|jfif|tiff?|qoi|tga|pcx|p[bgnp]m)$/i;

/** Why a file is no picture that can be asked about; "" for one that may be. */
function whyNot(file) {
  if (file.type === "image/svg+xml" || /\.svgz?$/i.test(file.name)) return "is an SVG drawing: save it as PNG first";
  if (!file.type.startsWith("image/") && !PICTURE.test(file.name)) return "is not a picture";
  return file.size ? "" : "is empty";
}

/** An error with the name of the picture that it is about, in the place of its number. */
function named(message, group) {
  const number = /^picture (\d+) of \d+: /.exec(message);
  const picture = group[number ? number[1] - 1 : 0];
  return picture ? message.replace(/^(?:picture \d+ of \d+: )?(?:the data URI|the picture given as bytes)/, () => picture.name) : message;
}

function showPictures() {
  find("pictures").replaceChildren(
    ...pictures.map((picture, index) => {
      const item = document.createElement("li");
      const remove = element("button", "×");
      remove.type = "button";
      remove.setAttribute("aria-label", `Remove ${picture.name}`);
      remove.onclick = () => {
        pictures.splice(index, 1);
        showPictures();
      };
      item.append(image(picture), remove);
      return item;
    }),
  );
}

function image(picture) {
  const shown = document.createElement("img");
  shown.src = picture.url;
  shown.alt = picture.name;
  shown.onerror = () => shown.replaceWith(element("span", `${picture.name} (no preview in this browser)`, "unseen"));
  return shown;
}

function element(tag, text = "", name = "") {
  const made = document.createElement(tag);
  made.textContent = text;
  made.className = name;
  return made;
}

// ---- questions ----

function send() {
  find("problem").textContent = "";
  const question = find("question").value.trim();
  if (!question) return find("question").focus();
  const groups = find("each").checked && pictures.length ? pictures.map((one) => [one]) : [[...pictures]];
  const times = Math.min(16, Math.max(1, Number(find("times").value) || 1));
  for (const group of groups) stream(question, group, times);
}

/** One request, answered so many times: a card for each answer. A browser opens six connections to a server, no more. */
async function stream(question, group, times) {
  const cards = Array.from({ length: times }, () => makeCard(question, group));
  const control = new AbortController();
  running.add(control);
  find("stop").disabled = false;
  for (const card of cards) card.stop.onclick = () => control.abort();
  try {
    await connections.take(control.signal);
    try {
      await read(await post(question, group, times, control.signal), cards);
    } finally {
      connections.give();
    }
  } catch (error) {
    const stopped = error.name === "AbortError";
    const message = named(error.message, group);
    if (!stopped) find("problem").textContent = message;
    for (const card of cards.filter((one) => !one.finish)) {
      card.box.classList.add(stopped ? "stopped" : "failed");
      card.about.textContent = stopped ? `stopped · ${facts(card)}` : message;
    }
  } finally {
    running.delete(control);
    find("stop").disabled = running.size === 0;
    cards.forEach(settle);
  }
}

function post(question, group, times, signal) {
  const images = group.map((picture) => ({ type: "image_url", image_url: { url: picture.url } }));
  return ask("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    signal,
    body: JSON.stringify({
      messages: [{ role: "user", content: [...images, { type: "text", text: question }] }],
      max_tokens: Number(find("max-tokens").value) || 256,
      temperature: Number(find("temperature").value) || 0,
      n: times,
      stream: true,
    }),
  });
}

async function read(response, cards) {
  for await (const event of events(response)) {
    if (event.error) throw new Error(event.error.message);
    for (const choice of event.choices) take(choice, cards[choice.index]);
  }
}

function take(choice, card) {
  const text = choice.delta.content ?? "";
  const thought = choice.delta.reasoning_content ?? "";
  if (text || thought) {
    card.last = performance.now();
    card.first ||= card.last;
    card.tokens += 1;
    card.text.append(text);
    card.thought.append(thought);
  }
  card.finish = choice.finish_reason ?? "";
  card.about.textContent = facts(card);
  if (card.finish) {
    card.box.classList.add("done");
    settle(card);
  }
}

function settle(card) {
  card.box.classList.remove("running");
  card.stop.remove();
}

function facts(card) {
  if (!card.first) return card.finish || "waiting";
  const seconds = (card.last - card.first) / 1000;
  const speed = seconds > 0 && card.tokens >= SPEED_FROM ? `${((card.tokens - 1) / seconds).toFixed(1)} tokens/s` : "";
  return [`first token after ${((card.first - card.began) / 1000).toFixed(2)} s`, `${card.tokens} tokens`, speed, card.finish]
    .filter(Boolean)
    .join(" · ");
}

function makeCard(question, group) {
  const box = element("article", "", "answer running");
  const text = element("p", "", "text");
  const thought = element("p", "", "thought");
  const line = element("div", "", "facts");
  const about = element("span", "waiting");
  const stop = element("button", "Stop");
  stop.type = "button";
  line.append(about, stop);
  box.append(element("h2", question), ...group.map(image), thought, text, line);
  find("answers").prepend(box);
  return { box, text, thought, about, stop, began: performance.now(), first: 0, last: 0, tokens: 0, finish: "" };
}

function stopAll() {
  for (const control of running) control.abort();
}

// ---- wiring ----

find("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
find("files").addEventListener("change", (event) => {
  addFiles(event.target.files);
  event.target.value = "";
});
find("stop").addEventListener("click", stopAll);
find("clear").addEventListener("click", () => find("answers").replaceChildren());
find("key").addEventListener("change", (event) => sessionStorage.setItem("key", event.target.value.trim()));
document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) send();
  if (event.key === "Escape") stopAll();
});
document.addEventListener("paste", (event) => addFiles(event.clipboardData.files));
for (const kind of ["dragenter", "dragover"]) {
  document.addEventListener(kind, (event) => {
    event.preventDefault();
    find("drop").classList.add("over");
  });
}
document.addEventListener("dragleave", (event) => {
  if (!event.relatedTarget) find("drop").classList.remove("over");
});
document.addEventListener("drop", (event) => {
  event.preventDefault();
  find("drop").classList.remove("over");
  addFiles(event.dataTransfer.files);
});
poll();
