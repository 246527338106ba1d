// What people do with clients of Node: `node node_clients.mjs NAME URL`, with the packages in node_modules of the
// working directory.
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const require = createRequire(pathToFileURL(process.cwd() + "/"));
const load = (name) => import(pathToFileURL(require.resolve(name)).href);
const PIXEL =
  "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg==";
const PICTURE = `data:image/png;base64,${PIXEL}`;
const QUESTION = "What is the total?";

async function openai(url) {
  const { default: OpenAI } = await load("openai");
  const client = new OpenAI({ baseURL: url + "/v1", apiKey: "none", maxRetries: 0 });
  const content = [{ type: "text", text: QUESTION }, { type: "image_url", image_url: { url: PICTURE } }];
  const asked = [{ role: "user", content }];
  const schema = {
    type: "object", properties: { shop: { type: "string" }, total: { type: "string" } },
    required: ["shop", "total"], additionalProperties: false,
  };
  const form = { type: "json_schema", json_schema: { name: "receipt", strict: true, schema } };
  const how = { model: "model", max_completion_tokens: 60 };
  await client.chat.completions.create({ ...how, messages: asked });
  const first = await client.chat.completions.parse({ ...how, messages: asked, response_format: form });
  const again = [...asked, first.choices[0].message, { role: "user", content: "And the shop?" }];
  await client.chat.completions.parse({ ...how, messages: again, response_format: form });
  const runner = client.chat.completions.runTools({
    ...how, messages: asked,
    tools: [{
      type: "function",
      function: {
        name: "lookup", description: "Look a shop up.", parse: JSON.parse, function: () => "a bakery",
        parameters: { type: "object", properties: { shop: { type: "string" } } },
      },
    }],
  });
  await runner.finalContent();
  const stream = client.chat.completions.stream({ ...how, messages: asked });
  await stream.finalContent();
}

async function ai_sdk(url) {
  const { generateText, generateObject, streamText, tool, jsonSchema, stepCountIs } = await load("ai");
  const { createOpenAICompatible } = await load("@ai-sdk/openai-compatible");
  const provider = createOpenAICompatible({ name: "ours", baseURL: url + "/v1", supportsStructuredOutputs: true });
  const model = provider("model");
  const messages = [{
    role: "user",
    content: [{ type: "text", text: QUESTION }, { type: "image", image: Buffer.from(PIXEL, "base64"), mediaType: "image/png" }],
  }];
  const how = { model, maxOutputTokens: 60, maxRetries: 0 };
  const first = await generateText({ ...how, messages });
  await generateText({ ...how, messages: [...messages, ...first.response.messages, { role: "user", content: "Sure?" }] });
  const schema = jsonSchema({
    type: "object", properties: { shop: { type: "string" }, total: { type: "string" } },
    required: ["shop", "total"], additionalProperties: false,
  });
  await generateObject({ ...how, messages, schema });
  const lookup = tool({
    description: "Look a shop up.", execute: async () => "a bakery",
    inputSchema: jsonSchema({ type: "object", properties: { shop: { type: "string" } } }),
  });
  await generateText({ ...how, messages, tools: { lookup }, stopWhen: stepCountIs(2) });
  await generateText({ ...how, messages, providerOptions: { ours: { reasoningEffort: "low" } } });
  const stream = streamText({ ...how, messages });
  for await (const _ of stream.textStream);
}

const clients = { openai, ai_sdk };
await clients[process.argv[2]](process.argv[3]);
