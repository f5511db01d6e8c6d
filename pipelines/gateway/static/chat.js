// The chat page. Model output is inserted as text nodes, never as HTML.
"use strict";

const KEY = "tuneline-key";
const byId = (id) => document.getElementById(id);
const columns = [];
let models = [];
let hasFeedback = false;

/** An error that is shown to the user as it is. */
class ShownError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

async function call(path, body, signal) {
  const headers = {};
  const key = sessionStorage.getItem(KEY);
  if (key) headers.authorization = `Bearer ${key}`;
  if (body) headers["content-type"] = "application/json";
  let response;
  try {
    response = await fetch(path, {method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body), signal});
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ShownError("The server does not respond. Check that it is running.");
  }
  if (response.ok) return response;
  let detail = "";
  try {
    detail = (await response.json()).error.message;
  } catch {
    detail = `status ${response.status}`;
  }
  if (response.status === 401) showKeyForm();
  throw new ShownError(explain(response, detail, key), response.status);
}

function explain(response, detail, key) {
  const wait = response.headers.get("retry-after");
  const later = wait ? ` Try again in ${wait} ${wait === "1" ? "second" : "seconds"}.` : "";
  switch (response.status) {
    case 401: return key ? "The server does not accept this API key." : "This server requires an API key.";
    case 413: return "The conversation is too long for the server. Start a new chat.";
    case 429: return `The server is busy or a limit is reached: ${detail}.${later}`;
    case 502: case 503: case 504: return `The model cannot answer now: ${detail}.${later}`;
    default: return `The server refused the request: ${detail}.`;
  }
}

function showKeyForm() {
  byId("key-form").hidden = false;
  byId("key").focus();
}

/** Yield the data of server-sent events. */
async function* readEvents(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  while (true) {
    const {done, value} = await reader.read();
    if (done) return;
    const lines = (rest + value).split(/\r?\n/);
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data:")) yield line.slice(5).trim();
    }
  }
}

function create(tag, className, text = "") {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.textContent = text;
  return element;
}

/** Show a text; lines between ``` marks become code blocks. */
function render(element, text) {
  const parts = text.split(/^```(.*)$/m);  // text, language, code, (rest of the closing line), text, ...
  const nodes = [];
  parts.forEach((part, number) => {
    if (number % 4 === 0 && part.trim()) nodes.push(create("p", "", part.replace(/^\n|\n$/g, "")));
    if (number % 4 === 2) {
      const block = create("pre");
      block.append(create("code", "", part.replace(/^\n|\n$/g, "")));
      nodes.push(block);
    }
  });
  element.replaceChildren(...nodes);
}

class Column {
  constructor(number) {
    const section = byId("column").content.cloneNode(true).firstElementChild;
    section.setAttribute("aria-label", `Conversation ${number}`);
    this.section = section;
    this.log = section.querySelector(".log");
    this.log.setAttribute("aria-label", `Messages of conversation ${number}`);
    this.fields = Object.fromEntries([...section.querySelectorAll("[name]")].map((each) => [each.name, each]));
    this.history = [];
    this.fillModels();
    byId("columns").append(section);
  }

  fillModels() {
    const chosen = this.fields.model.value;
    this.fields.model.replaceChildren(...models.map((model) => {
      const option = create("option", "", model.version ? `${model.id} (version ${model.version})` : model.id);
      option.value = model.id;
      return option;
    }));
    const taken = columns.filter((column) => column !== this).map((column) => column.fields.model.value);
    const other = models.find((model) => !taken.includes(model.id));
    const wanted = models.some((model) => model.id === chosen) ? chosen : (other || models[0])?.id;
    if (wanted) this.fields.model.value = wanted;
  }

  /** Return the request's settings; an empty field is not sent. Throws ShownError for an invalid one. */
  readSettings() {
    const settings = {model: this.fields.model.value};
    for (const name of ["temperature", "max_tokens", "seed"]) {
      const field = this.fields[name];
      if (!field.validity.valid) {
        const label = field.labels[0].textContent.trim();
        throw new ShownError(`${label} is not valid: ${field.validationMessage}`);
      }
      if (field.value !== "") settings[name] = Number(field.value);
    }
    return settings;
  }

  say(text) {
    this.history.push({role: "user", content: text});
    const bubble = create("article", "user");
    bubble.setAttribute("aria-label", "You");
    render(bubble, text);
    this.log.append(bubble);
    this.scroll(true);
    return this.answer();
  }

  /** Stream the answer to the last message of the history. */
  async answer() {
    const bubble = create("article", "model");
    bubble.setAttribute("aria-label", "Model");
    const content = create("div", "content");
    const facts = create("p", "facts", "waiting");
    bubble.append(content, facts);
    this.log.append(bubble);
    this.scroll(true);
    this.log.setAttribute("aria-busy", "true");
    this.abort = new AbortController();
    const answer = {text: "", began: performance.now(), first: 0, finish: "", usage: null, id: "", version: ""};
    let isDrawn = true;
    const draw = () => {
      render(content, answer.text);
      this.scroll();
      isDrawn = true;
    };
    try {
      const system = this.fields.system.value.trim();
      const messages = [...(system ? [{role: "system", content: system}] : []), ...this.history];
      const request = {...this.readSettings(), messages, stream: true, stream_options: {include_usage: true}};
      const response = await call("v1/chat/completions", request, this.abort.signal);
      answer.version = response.headers.get("x-tuneline-model-version") || "";
      for await (const data of readEvents(response.body)) {
        if (data === "[DONE]") {
          answer.isDone = true;
          break;
        }
        const event = JSON.parse(data);
        if (event.error) throw new ShownError(`The answer was interrupted: ${event.error.message}.`);
        answer.id = event.id || answer.id;
        answer.usage = event.usage || answer.usage;
        const choice = event.choices?.[0];
        answer.finish = choice?.finish_reason || answer.finish;
        if (choice?.delta?.content) {
          if (!answer.first) {
            answer.first = performance.now();
            facts.textContent = "answering";
          }
          answer.text += choice.delta.content;
          if (isDrawn) {
            isDrawn = false;
            requestAnimationFrame(draw);
          }
        }
      }
      if (!answer.isDone) throw new ShownError("The connection closed before the answer was complete.");
    } catch (error) {
      if (error.name === "AbortError") answer.finish = "stopped";
      else answer.error = error instanceof ShownError ? error : new ShownError(`The connection was lost: ${error.message}.`);
    }
    answer.ended = performance.now();
    draw();
    this.log.removeAttribute("aria-busy");
    this.finish(answer, bubble, facts);
  }

  finish(answer, bubble, facts) {
    if (!bubble.isConnected) return;  // a new chat has begun
    facts.textContent = describe(answer);
    if (answer.error && !answer.text) this.fail(answer.error, bubble);
    else if (answer.text || answer.isDone) {
      this.history.push({role: "assistant", content: answer.text});
      if (answer.error) bubble.append(create("p", "error", answer.error.message));
      else if (!answer.text) bubble.prepend(create("p", "facts", "(empty answer)"));
      if (hasFeedback && answer.id) bubble.append(createFeedback(answer));
    } else {
      this.history.pop();  // stopped before the first token: the message is not part of the conversation
    }
    this.scroll();
  }

  /** Show an error in place of an answer. The message leaves the conversation unless it is sent again. */
  fail(error, bubble) {
    const message = this.history.pop();
    bubble.className = "model failed";
    const retry = create("button", "", "Send again");
    retry.type = "button";
    retry.addEventListener("click", () => {
      if (isRunning()) return;
      bubble.remove();
      this.history.push(message);
      run([this.answer()]);
    });
    bubble.replaceChildren(create("p", "error", error.message), retry);
  }

  scroll(isForced = false) {
    const distance = this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight;
    if (isForced || distance < 160) this.log.scrollTop = this.log.scrollHeight;
  }

  reset() {
    this.abort?.abort();
    this.history = [];
    this.log.replaceChildren();
  }
}

function describe(answer) {
  const facts = [];
  const tokens = answer.usage?.completion_tokens;
  if (answer.version) facts.push(`version ${answer.version}`);
  if (answer.usage) facts.push(`${answer.usage.prompt_tokens} + ${tokens} tokens`);
  if (answer.first) facts.push(`first token ${((answer.first - answer.began) / 1000).toFixed(2)} s`);
  const seconds = (answer.ended - answer.first) / 1000;
  if (tokens > 1 && answer.first && seconds > 0.02) facts.push(`${((tokens - 1) / seconds).toFixed(1)} tokens/s`);
  if (answer.finish === "length") facts.push("token limit reached");
  if (answer.finish === "stopped") facts.push("stopped");
  return facts.join(" · ");
}

function createFeedback(answer) {
  const box = byId("feedback").content.cloneNode(true).firstElementChild;
  const [ratings, form] = [[...box.querySelectorAll("[data-rating]")], box.querySelector("form")];
  const [text, status] = [form.querySelector("textarea"), box.querySelector("[role=status]")];
  const stored = {rating: null, correction: null};

  async function store(change) {
    const feedback = {...stored, ...change};
    status.textContent = "";
    try {
      await call("v1/feedback", {id: answer.id, ...feedback});
    } catch (error) {
      status.textContent = error.message;
      return;
    }
    Object.assign(stored, feedback);
    for (const button of ratings) {
      button.setAttribute("aria-pressed", String(button.dataset.rating === stored.rating));
    }
    status.textContent = "Saved";
    form.hidden = true;
  }

  for (const button of ratings) {
    const rating = button.dataset.rating;
    button.addEventListener("click", () => store({rating: stored.rating === rating ? null : rating}));
  }
  box.querySelector("[data-correct]").addEventListener("click", () => {
    form.hidden = !form.hidden;
    if (form.hidden) return;
    text.value = stored.correction ?? answer.text;
    text.focus();
  });
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    store({correction: text.value});
  });
  return box;
}

const isRunning = () => !byId("stop").hidden;

async function run(answers) {
  byId("send").hidden = true;
  byId("stop").hidden = false;
  await Promise.all(answers);
  byId("send").hidden = false;
  byId("stop").hidden = true;
}

function send() {
  const field = byId("message");
  const text = field.value.trim();
  if (!models.length) load();
  if (!text || isRunning() || !models.length) return;
  field.value = "";
  resizeField();
  run(columns.map((column) => column.say(text)));
}

function resizeField() {
  const field = byId("message");
  field.rows = Math.min(8, field.value.split("\n").length);
}

async function load() {
  byId("notice").hidden = true;
  try {
    const config = await (await call("chat/config.json")).json();
    hasFeedback = config.feedback;
    models = (await (await call("v1/models")).json()).data;
    if (!models.length) throw new ShownError("No model is loaded.");
    byId("key-form").hidden = true;
    columns.forEach((column) => column.fillModels());
  } catch (error) {
    byId("notice").firstElementChild.textContent = error.message;
    byId("notice").lastElementChild.hidden = error.status === 401;
    byId("notice").hidden = false;
  }
}

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
byId("message").addEventListener("input", resizeField);
byId("message").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  }
});
const stop = () => columns.forEach((column) => column.abort?.abort());
byId("stop").addEventListener("click", stop);
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") stop();
});
byId("reset").addEventListener("click", () => {
  columns.forEach((column) => column.reset());
  byId("message").focus();
});
byId("compare").addEventListener("click", () => {
  if (columns.length === 2) {
    const column = columns.pop();
    column.reset();
    column.section.remove();
  } else {
    columns.push(new Column(2));
  }
  byId("compare").setAttribute("aria-pressed", String(columns.length === 2));
});
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, byId("key").value.trim());
  byId("key").value = "";
  load();
});
byId("notice").lastElementChild.addEventListener("click", load);

columns.push(new Column(1));
load();
