// OpenAI's and Anthropic's packages for node, against a running server: SERVER is its address, PICTURE a PNG.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";

import Anthropic from "@anthropic-ai/sdk";
import { betaZodTool } from "@anthropic-ai/sdk/helpers/beta/zod";
import OpenAI, { toFile } from "openai";
import { zodFunction, zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

const server = process.env.SERVER;
const openai = new OpenAI({ baseURL: `${server}/v1`, apiKey: "none", maxRetries: 0 });
const anthropic = new Anthropic({ baseURL: server, apiKey: "none", maxRetries: 0 });
const picture = readFileSync(process.env.PICTURE);
const dataUri = `data:image/png;base64,${picture.toString("base64")}`;

const model = "qwen2_vl";
const asked = { role: "user", content: "count to 3" };
const what = "describe the picture";
const Place = z.object({ place: z.enum(["Bern", "Basel"]) });
const schema = {
  type: "object",
  properties: { place: { type: "string", enum: ["Bern", "Basel"] } },
  required: ["place"],
  additionalProperties: false,
};
const placeOf = (text) => Place.parse(JSON.parse(text)).place;

// Chat completions

test("chat: an answer, whole and streamed", async () => {
  const whole = await openai.chat.completions.create({ model, messages: [asked] });
  assert.equal(whole.choices[0].message.content, "1 2 3");
  const stream = openai.chat.completions.stream({ model, messages: [asked], stream_options: { include_usage: true } });
  let said = "";
  stream.on("content", (delta) => (said += delta));
  const final = await stream.finalChatCompletion();
  assert.equal(said, "1 2 3");
  assert.equal(final.choices[0].message.content, said);
  assert.equal((await stream.totalUsage()).total_tokens, whole.usage.total_tokens);
});

test("chat: a picture", async () => {
  const content = [
    { type: "image_url", image_url: { url: dataUri } },
    { type: "text", text: what },
  ];
  const answer = await openai.chat.completions.create({ model, messages: [{ role: "user", content }] });
  assert.match(answer.choices[0].message.content, /red/);
});

test("chat: parse", async () => {
  const answer = await openai.chat.completions.parse({
    model,
    messages: [asked],
    response_format: zodResponseFormat(Place, "place"),
  });
  assert.ok(["Bern", "Basel"].includes(answer.choices[0].message.parsed.place));
});

test("chat: parse a tool's arguments", async () => {
  const answer = await openai.chat.completions.parse({
    model,
    messages: [asked],
    tools: [zodFunction({ name: "weather", parameters: Place })],
    tool_choice: "required",
  });
  const [call] = answer.choices[0].message.tool_calls;
  assert.ok(["Bern", "Basel"].includes(call.function.parsed_arguments.place));
});

test("chat: run tools", async () => {
  const places = [];
  const runner = openai.chat.completions.runTools(
    {
      model,
      messages: [asked],
      max_tokens: 60,
      tool_choice: { type: "function", function: { name: "weather" } },
      tools: [
        {
          type: "function",
          function: {
            name: "weather",
            parameters: schema,
            parse: JSON.parse,
            function: ({ place }) => {
              places.push(place);
              return "sun";
            },
          },
        },
      ],
      stream: true,
    },
  );
  await runner.done();
  assert.equal(places.length, 1);
  assert.equal(runner.messages.at(-1).content, "sun");
});

test("chat: an error has its class", async () => {
  const asking = openai.chat.completions.create({ model, messages: [asked], temperature: -1 });
  await assert.rejects(asking, (error) => {
    assert.ok(error instanceof OpenAI.BadRequestError);
    assert.equal(error.param, "temperature");
    return true;
  });
});

// Responses

test("responses: an answer, whole and streamed, and the next turn", async () => {
  const first = await openai.responses.create({ model, input: "count to 3" });
  assert.equal(first.output_text, "1 2 3");
  const next = { model, previous_response_id: first.id, input: "count to 3" };
  const whole = await openai.responses.create(next);
  const stream = openai.responses.stream(next);
  let said = "";
  stream.on("response.output_text.delta", (event) => (said += event.delta));
  const final = await stream.finalResponse();
  assert.equal(said, whole.output_text);
  assert.equal(final.output_text, said);
  const kept = await openai.responses.retrieve(final.id);
  assert.equal(kept.output_text, said);
  const items = await openai.responses.inputItems.list(final.id);
  assert.equal(items.data[0].content[0].text, "count to 3");
  await openai.responses.delete(final.id);
  await assert.rejects(openai.responses.retrieve(final.id), OpenAI.NotFoundError);
});

test("responses: a picture", async () => {
  const content = [
    { type: "input_image", image_url: dataUri, detail: "auto" },
    { type: "input_text", text: what },
  ];
  const answer = await openai.responses.create({ model, input: [{ role: "user", content }] });
  assert.match(answer.output_text, /red/);
});

test("responses: parse", async () => {
  const answer = await openai.responses.parse({
    model,
    input: "count to 3",
    text: { format: zodTextFormat(Place, "place") },
  });
  assert.ok(["Bern", "Basel"].includes(answer.output_parsed.place));
});

for (const streams of [false, true]) {
  test(`responses: the tool loop, ${streams ? "streamed" : "whole"}`, async () => {
    const tools = [{ type: "function", name: "weather", parameters: schema, strict: true }];
    const first = { model, input: [asked], tools, tool_choice: "required", parallel_tool_calls: false };
    const answer = streams
      ? await openai.responses.stream(first).finalResponse()
      : await openai.responses.create(first);
    const [call] = answer.output.filter((item) => item.type === "function_call");
    placeOf(call.arguments);
    const told = { type: "function_call_output", call_id: call.call_id, output: "sun" };
    const again = await openai.responses.create({ model, input: [asked, ...answer.output, told], tools, max_output_tokens: 60 });
    assert.ok(["completed", "incomplete"].includes(again.status));
  });
}

test("responses: in the background, followed and cancelled", async () => {
  const begun = await openai.responses.create({ model, input: "count to 3", background: true });
  const stream = await openai.responses.retrieve(begun.id, { stream: true });
  const kinds = [];
  for await (const event of stream) kinds.push(event.type);
  assert.equal(kinds.at(-1), "response.completed");
  const long = { model, input: "count to 3", background: true, max_output_tokens: 2000, min_tokens: 2000 };
  const other = await openai.responses.create(long);
  const ended = await openai.responses.cancel(other.id);
  assert.equal(ended.status, "cancelled");
});

test("responses: input tokens", async () => {
  const counted = await openai.responses.inputTokens.count({ model, input: "count to 3" });
  const answer = await openai.responses.create({ model, input: "count to 3" });
  assert.equal(counted.input_tokens, answer.usage.input_tokens);
});

// Files and batches

test("files: upload, list, read, delete", async () => {
  const file = await openai.files.create({ file: await toFile(picture, "red.png"), purpose: "vision" });
  assert.equal(file.bytes, picture.length);
  const ids = [];
  for await (const one of openai.files.list()) ids.push(one.id);
  assert.ok(ids.includes(file.id));
  const content = [
    { type: "input_image", file_id: file.id, detail: "auto" },
    { type: "input_text", text: what },
  ];
  const answer = await openai.responses.create({ model, input: [{ role: "user", content }] });
  assert.match(answer.output_text, /red/);
  const read = Buffer.from(await (await openai.files.content(file.id)).arrayBuffer());
  assert.ok(read.equals(picture));
  assert.equal((await openai.files.delete(file.id)).deleted, true);
});

test("batches: from the file to the answers", async () => {
  const rows = ["a", "b"].map((custom_id) => ({
    custom_id,
    method: "POST",
    url: "/v1/chat/completions",
    body: { model, messages: [asked] },
  }));
  const lines = rows.map((row) => JSON.stringify(row)).join("\n");
  const file = await openai.files.create({ file: await toFile(Buffer.from(lines), "rows.jsonl"), purpose: "batch" });
  let batch = await openai.batches.create({
    input_file_id: file.id,
    endpoint: "/v1/chat/completions",
    completion_window: "24h",
  });
  while (!["completed", "failed", "expired", "cancelled"].includes(batch.status)) {
    await new Promise((resolve) => setTimeout(resolve, 50));
    batch = await openai.batches.retrieve(batch.id);
  }
  assert.equal(batch.status, "completed");
  const output = await (await openai.files.content(batch.output_file_id)).text();
  const answers = output.trim().split("\n").map((line) => JSON.parse(line));
  assert.deepEqual(answers.map((one) => one.custom_id).sort(), ["a", "b"]);
  for (const one of answers) assert.equal(one.response.body.choices[0].message.content, "1 2 3");
  const listed = [];
  for await (const one of openai.batches.list()) listed.push(one.id);
  assert.ok(listed.includes(batch.id));
});

// Messages

const weather = { name: "weather", description: "the weather", input_schema: schema };

test("messages: an answer, whole and streamed", async () => {
  const whole = await anthropic.messages.create({ model, max_tokens: 60, messages: [asked] });
  assert.equal(whole.content[0].text, "1 2 3");
  const stream = anthropic.messages.stream({ model, max_tokens: 60, messages: [asked] });
  let said = "";
  stream.on("text", (delta) => (said += delta));
  const final = await stream.finalMessage();
  assert.equal(said, "1 2 3");
  assert.equal(final.content[0].text, said);
  assert.equal(final.usage.output_tokens, whole.usage.output_tokens);
});

test("messages: a picture", async () => {
  const source = { type: "base64", media_type: "image/png", data: picture.toString("base64") };
  const content = [
    { type: "image", source },
    { type: "text", text: what },
  ];
  const answer = await anthropic.messages.create({ model, max_tokens: 60, messages: [{ role: "user", content }] });
  assert.match(answer.content[0].text, /red/);
});

for (const streams of [false, true]) {
  test(`messages: the tool loop, ${streams ? "streamed" : "whole"}`, async () => {
    const first = { model, max_tokens: 60, tools: [weather], messages: [asked], tool_choice: { type: "any" } };
    const answer = streams
      ? await anthropic.messages.stream(first).finalMessage()
      : await anthropic.messages.create(first);
    assert.equal(answer.stop_reason, "tool_use");
    const [use] = answer.content.filter((block) => block.type === "tool_use");
    Place.parse(use.input);
    const result = { type: "tool_result", tool_use_id: use.id, content: "sun" };
    const results = answer.content
      .filter((block) => block.type === "tool_use")
      .map((block) => ({ ...result, tool_use_id: block.id }));
    const turns = [asked, { role: "assistant", content: answer.content }, { role: "user", content: results }];
    const again = await anthropic.messages.create({ ...first, messages: turns, tool_choice: { type: "none" } });
    assert.ok(["end_turn", "max_tokens"].includes(again.stop_reason));
  });
}

test("messages: a runner of tools", async () => {
  const places = [];
  const tool = betaZodTool({
    name: "weather",
    description: "the weather",
    inputSchema: Place,
    run: ({ place }) => {
      places.push(place);
      return "sun";
    },
  });
  const runner = anthropic.beta.messages.toolRunner({
    model,
    max_tokens: 60,
    messages: [asked],
    tools: [tool],
    tool_choice: { type: "any" },
    max_iterations: 2,
  });
  await runner;
  assert.ok(places.length >= 1);
});

test("messages: count tokens", async () => {
  const counted = await anthropic.messages.countTokens({ model, messages: [asked] });
  const { usage } = await anthropic.messages.create({ model, max_tokens: 60, messages: [asked] });
  assert.equal(counted.input_tokens, usage.input_tokens + usage.cache_read_input_tokens);
});

test("messages: an error has its class", async () => {
  const asking = anthropic.messages.create({ model, max_tokens: 60, messages: [asked], temperature: -1 });
  await assert.rejects(asking, (error) => {
    assert.ok(error instanceof Anthropic.BadRequestError);
    assert.equal(error.error.error.type, "invalid_request_error");
    assert.ok(error.requestID);
    return true;
  });
});
