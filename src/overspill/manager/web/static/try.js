/* Try it: conversations with one model, or with two side by side; kept in this browser. */
"use strict";

/* Markdown as elements, never as markup: what a model writes cannot become a part of the page. */
function markdown(text) {
  const place = document.createDocumentFragment();
  const add = (parent, name, content) => {
    const element = document.createElement(name);
    if (content !== undefined) inline(element, content);
    parent.append(element);
    return element;
  };
  const lines = text.split("\n"), item = /^\s*([-*+]|\d+[.)])\s+/;
  for (let i = 0; i < lines.length; i++) {
    const line = lines[i], heading = /^#{1,6}\s+(.*)/.exec(line);
    if (/^\s*```/.test(line)) {
      const code = [];
      while (++i < lines.length && !/^\s*```/.test(lines[i])) code.push(lines[i]);
      const block = add(place, "pre");
      block.tabIndex = 0;
      block.textContent = code.join("\n");
    } else if (heading) {
      add(add(place, "p"), "b", heading[1]);
    } else if (item.test(line)) {
      const isNumbered = /^\s*\d/.test(line), list = add(place, isNumbered ? "ol" : "ul");
      if (isNumbered) list.start = Number.parseInt(line, 10);
      for (; i < lines.length && item.test(lines[i]); i++) add(list, "li", lines[i].replace(item, ""));
      i--;
    } else if (line.trim()) {
      const paragraph = [line];
      while (i + 1 < lines.length && lines[i + 1].trim() && !/^\s*(```|#{1,6}\s)/.test(lines[i + 1]) && !item.test(lines[i + 1])) paragraph.push(lines[++i]);
      add(place, "p", paragraph.join("\n"));
    }
  }
  return place;
}

function inline(parent, text) {
  const marks = /`([^`]+)`|\*\*([^*]+)\*\*|\*([^*\s][^*]*)\*|\[([^\]]+)\]\((https?:\/\/[^\s)]+)\)/g;
  let from = 0;
  for (const found of text.matchAll(marks)) {
    parent.append(text.slice(from, found.index));
    const [whole, code, bold, italic, label, address] = found;
    const element = document.createElement(code ? "code" : bold ? "b" : italic ? "i" : "a");
    element.textContent = code || bold || italic || label;
    if (address) Object.assign(element, { href: address, rel: "noopener noreferrer", target: "_blank" });
    parent.append(element);
    from = found.index + whole.length;
  }
  parent.append(text.slice(from));
}

document.addEventListener("DOMContentLoaded", () => {
  const form = document.getElementById("try");
  if (!form) return;
  const at = (id) => document.getElementById(id);
  const kept = ["try-model", "try-other", "try-kind", "try-tokens", "try-temperature", "try-system"];
  const lanes = [{ turns: at("turns"), select: at("try-model"), messages: [] }, { turns: at("turns-other"), select: at("try-other"), messages: [] }];
  let stopping = null;

  function keep() {
    const fields = Object.fromEntries(kept.map((id) => [id, at(id).value]));
    try { localStorage.setItem("overspill-try", JSON.stringify({ fields, lanes: lanes.map((lane) => lane.messages) })); } catch { /* full, or forbidden */ }
    showCode();
  }

  function restore() {
    let before = null;
    try { before = JSON.parse(localStorage.getItem("overspill-try")); } catch { /* none, or not ours */ }
    if (before) {
      /* A link names the model: what was said to another one is not shown there. */
      const isOther = form.dataset.chosen && before.fields["try-model"] !== form.dataset.chosen;
      kept.filter((id) => !isOther || id !== "try-model").forEach((id) => {
        const isThere = at(id).tagName !== "SELECT" || [...at(id).options].some((one) => one.value === before.fields[id]);
        if (isThere) at(id).value = before.fields[id] ?? "";
      });
      if (!isOther) lanes.forEach((lane, index) => {
        lane.messages = before.lanes[index] ?? [];
        lane.messages.forEach((one) => show(turn(lane, one.role), one.content, one.reasoning));
      });
    }
    at("turns-other").hidden = !at("try-other").value;
    showCode();
  }

  function turn(lane, role) {
    const element = document.createElement("li");
    element.className = role;
    lane.turns.append(element);
    return element;
  }

  function show(place, text, reasoning) {
    place.replaceChildren();
    if (reasoning) {
      const fold = document.createElement("details"), head = document.createElement("summary"), inside = document.createElement("div");
      head.textContent = "Reasoning";
      inside.textContent = reasoning;
      inside.className = "quiet";
      fold.open = !text;
      fold.append(head, inside);
      place.append(fold);
    }
    place.append(place.className === "user" ? text : markdown(text));
  }

  const inPath = (model) => model.split("/").map(encodeURIComponent).join("/");
  const nothing = { ram_hit_tokens: 0, prefix_hits: 0 };
  async function counted(model) {
    const answer = await fetch("/api/engine-metrics/" + inPath(model)).catch(() => null);
    return answer?.ok ? await answer.json() : null;
  }
  const grown = (before, after, name) => (after === null || after[name] === null ? null : after[name] - (before?.[name] ?? 0));
  const isChat = () => at("try-kind").value === "chat";
  const path = () => (isChat() ? "/v1/chat/completions" : "/v1/completions");

  /* What is sent, as a conversation or as one text. */
  function request(model, messages) {
    const asked = { model, max_tokens: Number(at("try-tokens").value) || 256 };
    if (at("try-temperature").value !== "") asked.temperature = Number(at("try-temperature").value);
    if (!isChat()) return { ...asked, prompt: messages.map((one) => one.content).join("") };
    const system = at("try-system").value.trim();
    const told = messages.map(({ role, content }) => ({ role, content }));
    return { ...asked, messages: system ? [{ role: "system", content: system }, ...told] : told };
  }

  function showCode() {
    const asked = request(at("try-model").value, lanes[0].messages.length ? lanes[0].messages : [{ role: "user", content: "Hello" }]);
    const body = JSON.stringify(asked, null, 2);
    at("try-curl").textContent = ["curl " + location.origin + path() + " \\", "  -H 'Content-Type: application/json' \\", "  -H \"Authorization: Bearer $OVERSPILL_API_KEY\" \\", "  -d '" + body.replaceAll("'", "'\\''") + "'"].join("\n");
    const call = isChat() ? ["client.chat.completions", "message.content"] : ["client.completions", "text"];
    at("try-python").textContent = ["import json", "from openai import OpenAI", "", "client = OpenAI(base_url=" + JSON.stringify(location.origin + "/v1") + ", api_key=\"none\")", "asked = json.loads(" + JSON.stringify(JSON.stringify(asked)) + ")", "print(" + call[0] + ".create(**asked).choices[0]." + call[1] + ")"].join("\n");
  }

  const engineOf = (model) => fetch("/api/engines/" + inPath(model)).then((answer) => (answer.ok ? answer.json() : null), () => null);

  /* What a model does before it can answer. */
  function startOf(engine) {
    if (engine.state === "starting") return "starting: " + (engine.phase || (engine.pid ? "the process begins" : "waiting for room")) + ", " + duration(Date.now() / 1000 - engine.since);
    return engine.state === "ready" ? "" : engine.state + ": waiting for its turn to start";
  }

  async function tellStart(model, place, isOver) {
    while (!isOver()) {
      const engine = await engineOf(model);
      if (isOver()) return;
      place.textContent = engine ? startOf(engine) : "";
      if (!engine || engine.state === "ready") return;
      await new Promise((later) => setTimeout(later, 500));
    }
  }

  async function ask(lane, prompt, control) {
    const model = lane.select.value;
    const told = lane.messages;  // a new conversation may be begun meanwhile
    told.push({ role: "user", content: prompt });
    const asked = turn(lane, "user"), place = turn(lane, "assistant");
    show(asked, prompt);
    const answer = { text: "", reasoning: "", first: null, last: null, usage: null };
    const isReady = (await engineOf(model))?.state === "ready";
    /* An engine that starts only now has taken nothing from RAM before. */
    const before = isReady ? await counted(model) : nothing;
    const began = performance.now();
    if (!isReady) tellStart(model, place, () => answer.first !== null || !place.isConnected || control.signal.aborted);
    try {
      await hear(answer, place, request(model, told), control.signal);
    } catch (error) {
      /* What was answered before it was stopped is a turn; a question without an answer is none. */
      if (error.name !== "AbortError" || !(answer.text || answer.reasoning)) {
        told.pop();
        asked.remove();
        place.remove();
        at("try-prompt").value ||= prompt;
        if (error.name === "AbortError") return;
        throw error;
      }
    }
    told.push({ role: "assistant", content: answer.text, reasoning: answer.reasoning });
    [...lane.select.options].find((one) => one.value === model).textContent = model;  // it has started by now
    await showNumbers(lane, place, answer, model, before, began, isReady);
  }

  async function hear(answer, place, body, signal) {
    const response = await fetch(path(), {
      method: "POST", signal, headers: { "content-type": "application/json" },
      body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    });
    if (!response.ok) throw new Error((await response.json()).error.message);
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) break;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        if (!part.startsWith("data: ") || part === "data: [DONE]") continue;
        const told = JSON.parse(part.slice(6));
        if (told.error) throw new Error(told.error.message);
        if (told.usage) answer.usage = told.usage;
        const delta = told.choices?.[0]?.delta;
        const thought = delta?.reasoning_content || delta?.reasoning || "";
        const piece = told.choices?.[0]?.text || delta?.content || "";
        if (!piece && !thought) continue;
        answer.last = performance.now();
        answer.first = answer.first ?? answer.last;
        answer.text += piece;
        answer.reasoning += thought;
        show(place, answer.text, answer.reasoning);
      }
    }
    show(place, answer.text, answer.reasoning);
  }

  async function showNumbers(lane, place, { first, last, usage }, model, before, began, isReady) {
    const ttft = first === null ? "–" : shown((first - began) / 1000, "s") + (isReady ? "" : ", with the start");
    const rate = usage && last > first ? (usage.completion_tokens - 1) / ((last - first) / 1000) : null;
    if (at("try-other").value) {
      const told = document.createElement("p");
      told.className = "quiet";
      told.textContent = model + ": " + shown(rate, "tok/s") + ", TTFT " + ttft;
      place.append(told);
    }
    if (lane !== lanes[0]) return;
    at("try-ttft").textContent = ttft;
    at("try-speed").textContent = shown(rate, "tok/s");
    at("try-prompt-tokens").textContent = shown(usage?.prompt_tokens ?? null, "tokens");
    at("try-answer-tokens").textContent = shown(usage?.completion_tokens ?? null, "tokens");
    const after = await counted(model);
    const fromRam = grown(before, after, "ram_hit_tokens");
    const onGpu = grown(before, after, "prefix_hits");
    const cached = usage?.prompt_tokens_details?.cached_tokens ?? (fromRam === null && onGpu === null ? null : (fromRam ?? 0) + (onGpu ?? 0));
    at("try-cached").textContent = shown(cached, "tokens");
    at("try-ram").textContent = shown(fromRam, "tokens");
  }

  function busy(isBusy) {
    at("try-send").disabled = isBusy;
    at("try-stop").disabled = !isBusy;
    at("try-numbers").classList.toggle("stale", isBusy);
    /* The button that was pressed cannot be pressed now, and would take the focus with it. */
    at("try-prompt").focus({ preventScroll: true });
  }

  function begin() {
    stopping?.abort();
    lanes.forEach((lane) => { lane.messages = []; lane.turns.replaceChildren(); });
    at("turns-other").hidden = !at("try-other").value;
    keep();
  }

  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const prompt = at("try-prompt").value;
    notify("");
    at("try-prompt").value = "";
    busy(true);
    const control = stopping = new AbortController();
    const asked = await Promise.allSettled(lanes.filter((lane) => lane.select.value).map((lane) => ask(lane, prompt, control)));
    notify(asked.filter((one) => one.status === "rejected").map((one) => String(one.reason.message || one.reason)).join("\n"));
    keep();
    busy(false);
  });
  at("try-prompt").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    if (!at("try-send").disabled) form.requestSubmit();
  });
  at("try-stop").addEventListener("click", () => stopping?.abort());
  at("try-new").addEventListener("click", begin);
  ["try-kind", "try-model", "try-other"].forEach((id) => at(id).addEventListener("change", begin));
  ["try-tokens", "try-temperature", "try-system"].forEach((id) => at(id).addEventListener("input", keep));
  restore();
});
