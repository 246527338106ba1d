"use strict";

const SAMPLES = 120; // half a second each: one minute
const POLL_MS = 500;
const SPEED_FROM = 20; // tokens: the speed of fewer says nothing
const find = (id) => document.getElementById(id);
const pictures = []; // {name, url} with data URLs
const running = new Set(); // AbortControllers
const history = []; // of the charts
let followed = null; // the card whose conversation the next question goes on

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
  askForKey(response.status === 401);
  if (!response.ok) throw new Error(await reason(response));
  return response;
}

function askForKey(isNeeded) {
  const row = find("key-row");
  const hadFocus = row.contains(document.activeElement);
  row.hidden = !isNeeded;
  if (hadFocus && !isNeeded) find("question").focus();
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
      show("model", `${now.model}: ${now.status}`);
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
      show("model", error.message);
    }
  }
  setTimeout(poll, POLL_MS);
}

/** Readers of screens say a status whenever it is set, so it is set when it is new. */
function show(id, text) {
  if (find(id).textContent !== text) find(id).textContent = text;
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

async function addFiles(files) {
  const taken = [];
  const refused = [];
  for (const file of files) {
    const why = whyNot(file);
    if (why) refused.push(`${file.name || "the file"} ${why}`);
    else taken.push(file);
  }
  find("problem").textContent = refused.join("; ");
  for (const file of taken) {
    try {
      pictures.push({ name: file.name || "pasted picture", url: await dataUrl(file) });
      showPictures();
    } catch (error) {
      find("problem").textContent = `${file.name} cannot be read: ${error.message}`;
    }
  }
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}

/** Names of pictures to which browsers give no type; the server goes by what they hold. */
const PICTURE = /\.(hei[cf]|hif|avif|jp2|j2k|jfif|tiff?|qoi|tga|pcx|p[bgnp]m)$/i;

/** Why a file is no picture that can be asked about; "" for one that may be. */
function whyNot(file) {
  if (file.type === "image/svg+xml" || /\.svgz?$/i.test(file.name)) return "is an SVG drawing: save it as PNG first";
  if (!file.type.startsWith("image/") && !PICTURE.test(file.name)) return "is not a picture";
  return file.size ? "" : "is empty";
}

/** An error with the name of the picture that it is about, in the place of its number in the conversation. */
function named(message, turn) {
  const number = /^picture (\d+) of \d+: /.exec(message);
  const picture = allPictures(turn)[number ? number[1] - 1 : 0];
  return picture ? message.replace(/^(?:picture \d+ of \d+: )?(?:the data URI|the picture given as bytes)/, () => picture.name) : message;
}

function allPictures(turn) {
  return [...(turn.before ? allPictures(turn.before.turn) : []), ...turn.group];
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
        (find("pictures").querySelectorAll("button")[index] ?? find("question")).focus();
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
  shown.onerror = () => shown.replaceWith(element("span", `${picture.name} (no preview in this browser)`, "nameless"));
  return shown;
}

function element(tag, text = "", name = "") {
  const made = document.createElement(tag);
  made.textContent = text;
  made.className = name;
  return made;
}

function button(text, act) {
  const made = element("button", text);
  made.type = "button";
  made.onclick = act;
  return made;
}

// ---- questions ----

function send() {
  const question = find("question").value.trim();
  if (!question) return find("question").focus();
  if (running.size) {
    find("problem").textContent = "an answer is on its way: wait for it, or stop it with Escape";
    return;
  }
  find("problem").textContent = "";
  find("spoken").replaceChildren();
  const isEach = find("each").checked && pictures.length > 1;
  const groups = isEach ? pictures.map((one) => [one]) : [[...pictures]];
  const times = Math.min(16, Math.max(1, Number(find("times").value) || 1));
  const before = followed;
  const isOnly = groups.length * times === 1;
  write("", []);
  for (const group of groups) stream({ question, group, before, isOnly }, times);
  window.scrollTo(0, document.body.scrollHeight);
}

/** Put a question and its pictures where they can be edited. */
function write(question, group) {
  find("question").value = question;
  pictures.splice(0, pictures.length, ...group);
  showPictures();
}

/** One request, answered so many times: a card for each answer. A browser opens six connections to a server, no more. */
async function stream(turn, times) {
  const cards = Array.from({ length: times }, () => makeCard(turn));
  const control = new AbortController();
  running.add(control);
  find("stop").disabled = false;
  for (const card of cards) card.stop.onclick = () => control.abort();
  try {
    await connections.take(control.signal);
    try {
      await read(await post(turn, times, control.signal), cards);
    } finally {
      connections.give();
    }
  } catch (error) {
    for (const card of cards.filter((one) => !one.finish)) fail(card, error);
  } finally {
    running.delete(control);
    find("stop").disabled = running.size === 0;
    cards.forEach(settle);
  }
}

function fail(card, error) {
  const isStopped = error.name === "AbortError";
  const message = named(error.message, card.turn);
  if (!isStopped) find("problem").textContent = message;
  card.box.classList.add(isStopped ? "stopped" : "failed");
  card.about.textContent = isStopped ? `stopped · ${facts(card)}` : message;
  card.buttons.append(
    button("Edit", () => {
      follow(card.turn.before);
      write(card.turn.question, card.turn.group);
    }),
  );
}

function post(turn, times, signal) {
  const system = find("system").value.trim();
  const messages = [...(turn.before?.messages ?? []), asked(turn)];
  if (system) messages.unshift({ role: "system", content: system });
  return ask("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    signal,
    body: JSON.stringify({
      messages,
      max_tokens: Number(find("max-tokens").value) || 256,
      temperature: Number(find("temperature").value) || 0,
      n: times,
      stream: true,
    }),
  });
}

function asked(turn) {
  const images = turn.group.map((picture) => ({ type: "image_url", image_url: { url: picture.url } }));
  return { role: "user", content: [...images, { type: "text", text: turn.question }] };
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
    const isAtEnd = window.innerHeight + window.scrollY > document.body.scrollHeight - 100;
    card.last = performance.now();
    card.first ||= card.last;
    card.tokens += 1;
    card.text.append(text);
    card.thought.append(thought);
    speak(card, text);
    if (isAtEnd) window.scrollTo(0, document.body.scrollHeight);
  }
  card.finish = choice.finish_reason ?? "";
  card.about.textContent = facts(card);
  if (card.finish) {
    card.box.classList.add("done");
    settle(card);
  }
}

/** For readers of screens: whole sentences of an answer that comes alone; of several, each answer at its end. */
function speak(card, text, isEnd = false) {
  card.unsaid += text;
  const [sentences] = isEnd ? [card.unsaid] : (card.turn.isOnly && /^[^]*[.!?\n]\s/.exec(card.unsaid)) || [""];
  if (!sentences.trim()) return;
  card.unsaid = card.unsaid.slice(sentences.length);
  find("spoken").append(element("p", sentences.trim()));
}

/** What is done once an answer has ended, however it ended. */
function settle(card) {
  if (!card.box.classList.contains("running")) return;
  const hadFocus = document.activeElement === card.stop;
  card.box.classList.remove("running");
  card.stop.remove();
  speak(card, "", true);
  if (card.box.classList.contains("stopped")) find("spoken").append(element("p", "stopped"));
  const text = card.text.textContent;
  if (text) {
    card.messages = [...(card.turn.before?.messages ?? []), asked(card.turn), { role: "assistant", content: text }];
    const further = button("Follow up", () => follow(card));
    further.className = "further";
    card.buttons.prepend(button("Copy", (event) => copy(card, event.target)), further);
    // of several answers, the first that ends is followed unless another is chosen
    if (followed === card.turn.before && card.box.isConnected) follow(card, false);
  }
  if (hadFocus) find("question").focus();
}

/** Let the next question go on a card's conversation, or begin one. */
function follow(card, takesFocus = true) {
  followed?.box.classList.remove("followed");
  followed = card;
  card?.box.classList.add("followed");
  find("question-label").textContent = card ? `Follow-up to “${shortened(card.text.textContent)}”` : "Question";
  if (takesFocus) find("question").focus();
}

function shortened(text) {
  return text.length > 60 ? `${text.slice(0, 57)}…` : text;
}

async function copy(card, pressed) {
  const text = card.text.textContent;
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // only pages from this machine or with TLS may write there; others may copy what is selected
    window.getSelection().selectAllChildren(card.text);
    document.execCommand("copy");
  }
  pressed.textContent = "Copied";
  find("spoken").append(element("p", "copied"));
}

function facts(card) {
  if (!card.first) return card.finish || "waiting";
  const seconds = (card.last - card.first) / 1000;
  const speed = seconds > 0 && card.tokens >= SPEED_FROM ? `${((card.tokens - 1) / seconds).toFixed(1)} tokens/s` : "";
  return [`first token after ${((card.first - card.began) / 1000).toFixed(2)} s`, `${card.tokens} tokens`, speed, card.finish]
    .filter(Boolean)
    .join(" · ");
}

function makeCard(turn) {
  const { question, group, before } = turn;
  const box = element("article", "", "answer running");
  const text = element("p", "", "text");
  const thought = element("p", "", "thought");
  const line = element("div", "", "facts");
  const about = element("span", "waiting");
  const buttons = element("span", "", "buttons");
  const stop = button("Stop");
  buttons.append(stop);
  line.append(about, buttons);
  box.append(element("h2", question), ...group.map(image), thought, text, line);
  const isBranch = before && before.box !== find("answers").lastElementChild;
  if (isBranch) box.prepend(element("p", `follows “${shortened(before.text.textContent)}”`, "follows"));
  find("answers").append(box);
  return { turn, box, text, thought, about, buttons, stop, unsaid: "", began: performance.now(), first: 0, last: 0, tokens: 0, finish: "" };
}

function stopAll() {
  for (const control of running) control.abort();
}

function begin() {
  stopAll();
  find("answers").replaceChildren();
  find("spoken").replaceChildren();
  find("problem").textContent = "";
  follow(null);
}

// ---- wiring ----

find("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
find("files").addEventListener("change", async (event) => {
  await addFiles([...event.target.files]);
  event.target.value = "";
  find("question").focus();
});
find("stop").addEventListener("click", () => {
  stopAll();
  find("question").focus();
});
find("clear").addEventListener("click", begin);
find("key-row").addEventListener("submit", (event) => event.preventDefault());
find("key").addEventListener("change", (event) => sessionStorage.setItem("key", event.target.value.trim()));
find("question").addEventListener("keydown", (event) => {
  // what is written with an input method ends with Enter, too
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") stopAll();
});
document.addEventListener("paste", (event) => {
  const { files } = event.clipboardData;
  // a table of a spreadsheet comes as text and as a picture of it: the text is meant
  if (!files.length || event.clipboardData.getData("text/plain")) return;
  event.preventDefault();
  addFiles([...files]);
});
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
  addFiles([...event.dataTransfer.files]);
});
find("batch").open = window.matchMedia("(min-width: 48rem)").matches;
poll();
