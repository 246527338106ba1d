"""What people do with clients of Python: each function makes one client's requests.

``python python_clients.py NAME URL`` runs one, with the client's packages on the path.
"""

from __future__ import annotations

import asyncio
import base64
import io
import sys
from typing import Any

from PIL import Image

QUESTION = "What is the total?"


def picture() -> str:
    buffer = io.BytesIO()
    Image.new("RGB", (32, 32), "white").save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def asked(detail: str | None = None) -> list[dict[str, Any]]:
    url = {"url": picture(), **({} if detail is None else {"detail": detail})}
    return [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": QUESTION},
                {"type": "image_url", "image_url": url},
            ],
        }
    ]


def openai(url: str) -> None:
    """Chat, streams, forms, tools, and what they return put back into a conversation."""
    from openai import OpenAI, pydantic_function_tool
    from pydantic import BaseModel

    class Receipt(BaseModel):
        shop: str
        total: str

    class Lookup(BaseModel):
        """Look a shop up."""

        shop: str

    client = OpenAI(base_url=url + "/v1", api_key="none", max_retries=0)
    make: Any = client.chat.completions
    client.models.list()
    make.create(model="model", messages=asked("high"), max_tokens=8)
    make.create(
        model="model",
        messages=asked(),
        max_completion_tokens=8,
        seed=1,
        user="me",
        metadata={"run": "1"},
    )
    first = make.parse(
        model="model",
        messages=asked(),
        response_format=Receipt,
        max_completion_tokens=60,
    )
    again = [
        *asked(),
        first.choices[0].message,
        {"role": "user", "content": "And the shop?"},
    ]
    make.parse(
        model="model", messages=again, response_format=Receipt, max_completion_tokens=60
    )
    tools = [pydantic_function_tool(Lookup, name="lookup")]
    called = (
        make.parse(
            model="model", messages=asked(), tools=tools, max_completion_tokens=60
        )
        .choices[0]
        .message
    )
    done = {
        "role": "tool",
        "tool_call_id": called.tool_calls[0].id,
        "content": "a bakery",
    }
    make.parse(
        model="model",
        messages=[*asked(), called, done],
        tools=tools,
        max_completion_tokens=60,
    )
    plain = (
        make.create(
            model="model", messages=asked(), tools=tools, max_completion_tokens=60
        )
        .choices[0]
        .message
    )
    make.create(
        model="model",
        messages=[*asked(), plain.model_dump(), done],
        tools=tools,
        max_completion_tokens=60,
    )
    with make.stream(
        model="model", messages=asked(), max_completion_tokens=8
    ) as stream:
        said = stream.get_final_completion().choices[0].message
    with make.stream(
        model="model",
        messages=[*asked(), said, {"role": "user", "content": "Sure?"}],
        stream_options={"include_usage": True},
        max_completion_tokens=8,
    ) as stream:
        stream.until_done()


def langchain(url: str) -> None:
    """A chat, its content blocks put back, a form, a tool loop, and a stream."""
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI
    from pydantic import BaseModel

    class Receipt(BaseModel):
        """A receipt."""

        shop: str
        total: str

    @tool
    def lookup(shop: str) -> str:
        """Look a shop up."""
        return "a bakery"

    chat = ChatOpenAI(
        base_url=url + "/v1",
        api_key="none",
        model="model",
        max_tokens=60,
        max_retries=0,
    )
    turn = HumanMessage(
        content_blocks=[
            {"type": "text", "text": QUESTION},
            {
                "type": "image",
                "base64": picture().partition(",")[2],
                "mime_type": "image/png",
            },
        ]
    )
    first = chat.invoke([turn])
    chat.invoke([turn, first, HumanMessage(content="Sure?")])
    blocks = first.model_copy(update={"content": first.content_blocks})
    chat.invoke(
        [
            turn,
            blocks,
            HumanMessage(
                content_blocks=[{"type": "text", "text": "Sure?", "id": "lc_1"}]
            ),
        ]
    )
    chat.with_structured_output(Receipt).invoke([turn])
    chat.with_structured_output(Receipt, method="function_calling").invoke([turn])
    with_tools = chat.bind_tools([lookup])
    called = with_tools.invoke([turn])
    with_tools.invoke(
        [turn, called, ToolMessage("a bakery", tool_call_id=called.tool_calls[0]["id"])]
    )
    list(chat.stream([turn]))


def litellm(url: str) -> None:
    """A chat, a stream, tools put back, cache_control and reasoning_effort."""
    import litellm as lite

    lite.telemetry = False
    lite.drop_params = False
    how: dict[str, Any] = {
        "model": "openai/model",
        "api_base": url + "/v1",
        "api_key": "none",
        "max_tokens": 60,
    }
    first = lite.completion(messages=asked(), **how).choices[0].message
    lite.completion(
        messages=[*asked(), first, {"role": "user", "content": "Sure?"}], **how
    )
    cached = asked()
    cached[0]["content"][0]["cache_control"] = {"type": "ephemeral"}
    lite.completion(messages=cached, **how)
    function = {
        "name": "lookup",
        "parameters": {"type": "object", "properties": {"shop": {"type": "string"}}},
    }
    tools = [{"type": "function", "function": function}]
    called = lite.completion(messages=asked(), tools=tools, **how).choices[0].message
    done = {
        "role": "tool",
        "tool_call_id": called.tool_calls[0].id,
        "name": "lookup",
        "content": "a bakery",
    }
    lite.completion(messages=[*asked(), called, done], tools=tools, **how)
    lite.completion(
        messages=asked(),
        reasoning_effort="low",
        allowed_openai_params=["reasoning_effort"],
        **how,
    )
    list(
        lite.completion(
            messages=asked(), stream=True, stream_options={"include_usage": True}, **how
        )
    )


def instructor(url: str) -> None:
    """Forms by tools, by JSON schema and by JSON."""
    import instructor as make
    from openai import OpenAI
    from pydantic import BaseModel

    class Receipt(BaseModel):
        shop: str
        total: str

    for mode in (make.Mode.TOOLS, make.Mode.JSON_SCHEMA, make.Mode.JSON):
        client = make.from_openai(
            OpenAI(base_url=url + "/v1", api_key="none", max_retries=0), mode=mode
        )
        client.chat.completions.create(
            model="model",
            messages=asked(),
            response_model=Receipt,
            max_tokens=60,
            max_retries=1,
        )


def pydantic_ai(url: str) -> None:
    """An agent with a tool and a form, and a second turn with the history of the first."""
    from pydantic import BaseModel
    from pydantic_ai import Agent, BinaryContent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    class Receipt(BaseModel):
        shop: str
        total: str

    model = OpenAIChatModel(
        "model", provider=OpenAIProvider(base_url=url + "/v1", api_key="none")
    )
    shown = BinaryContent(
        base64.b64decode(picture().partition(",")[2]), media_type="image/png"
    )
    plain = Agent(model, instructions="Be short.")

    @plain.tool_plain
    def lookup(shop: str) -> str:
        """Look a shop up."""
        return "a bakery"

    first = plain.run_sync([QUESTION, shown], model_settings={"max_tokens": 60})
    plain.run_sync(
        "Sure?", message_history=first.all_messages(), model_settings={"max_tokens": 60}
    )
    Agent(model, output_type=Receipt).run_sync(
        [QUESTION, shown], model_settings={"max_tokens": 60}
    )


def openai_agents(url: str) -> None:
    """An agent with a tool over chat completions."""
    from agents import (
        Agent,
        OpenAIChatCompletionsModel,
        Runner,
        function_tool,
        set_tracing_disabled,
    )
    from openai import AsyncOpenAI

    @function_tool
    def lookup(shop: str) -> str:
        """Look a shop up."""
        return "a bakery"

    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0)
    model = OpenAIChatCompletionsModel(model="model", openai_client=client)
    agent = Agent(name="reader", instructions="Be short.", model=model, tools=[lookup])
    parts = [
        {"type": "input_text", "text": QUESTION},
        {"type": "input_image", "image_url": picture()},
    ]
    turn: Any = [{"role": "user", "content": parts}]

    async def run() -> None:
        await Runner.run(agent, turn)
        streamed = Runner.run_streamed(agent, turn)
        async for _ in streamed.stream_events():
            pass

    asyncio.run(run())


def mineru(url: str) -> None:
    """mineru-vl-utils: layout of a page, then its blocks."""
    from mineru_vl_utils import MinerUClient
    from mineru_vl_utils.vlm_client import SamplingParams

    page = Image.new("RGB", (200, 200), "white")
    client = MinerUClient(backend="http-client", server_url=url, model_name="model")
    client.layout_detect(page)
    client.content_extract(page)
    client.client.predict(
        page, "Read.", SamplingParams(no_repeat_ngram_size=100, max_new_tokens=60), 3
    )


def docling(url: str) -> None:
    """A page by each preset for a server in OpenAI's form."""
    from docling.datamodel import stage_model_specs as presets
    from docling.utils.api_image_request import api_image_request

    page = Image.new("RGB", (64, 64), "white")
    for name, preset in sorted(vars(presets).items()):
        spec = getattr(preset, "model_spec", None)
        for engine, config in getattr(spec, "api_overrides", {}).items():
            if name.isupper() and engine.value == "api_openai":
                api_image_request(
                    page, spec.prompt, url + "/v1/chat/completions", **config.params
                )


def olmocr(url: str) -> None:
    """A page, and a page in a guided form."""
    from tempfile import NamedTemporaryFile
    from types import SimpleNamespace

    from olmocr import pipeline

    async def run(path: str, *, guided: bool) -> None:
        pipeline.max_concurrent_requests_limit = asyncio.BoundedSemaphore(1)
        args = SimpleNamespace(
            server=url + "/v1",
            model="model",
            target_longest_image_dim=1288,
            guided_decoding=guided,
            api_key=None,
        )
        await pipeline.try_single_page(args, path, path, 1, 0, 0)

    with NamedTemporaryFile(suffix=".pdf") as file:
        Image.new("RGB", (64, 64), "white").save(file.name, "PDF")
        for guided in (False, True):
            asyncio.run(run(file.name, guided=guided))


def marker(url: str) -> None:
    """A form from its service for servers in OpenAI's form."""
    from marker.services.openai import OpenAIService
    from pydantic import BaseModel

    class Receipt(BaseModel):
        shop: str
        total: str

    service = OpenAIService(
        {
            "openai_base_url": url + "/v1",
            "openai_model": "model",
            "openai_api_key": "none",
            "openai_image_format": "png",
        }
    )
    service(QUESTION, Image.new("RGB", (64, 64), "white"), None, Receipt, max_retries=0)


def paddlex(url: str) -> None:
    """What PaddleOCR-VL's pipeline asks of mlx-vlm's and vLLM's servers: reading, and spotting."""
    from types import SimpleNamespace

    import numpy as np
    from paddlex.inference.models.common.genai import GenAIClient
    from paddlex.inference.models.doc_vlm.predictor import DocVLMGenAIClientPredictor

    page = [{"image": np.full((64, 64, 3), 255, np.uint8), "query": "OCR:"}]
    build = DocVLMGenAIClientPredictor._doc_vlm_genai_build_request_specs
    for backend, base in (("mlx-vlm-server", url), ("vllm-server", url + "/v1")):
        client = GenAIClient(backend, base, model_name="PaddleOCR-VL-1.5-0.9B")
        bounds = (112896, 1003520) if backend == "vllm-server" else (None, None)
        for skips in (True, False):
            holder = SimpleNamespace(model_name="PaddleOCR-VL-1.5-0.9B")
            for messages, how in build(
                holder, client, page, "PNG", None, skips, None, None, None, *bounds
            ):
                client.create_chat_completion(messages, **how)


def lmms_eval(url: str) -> None:
    """A question with a picture, and one about a video that the server reads itself."""
    import importlib.abc
    from importlib.machinery import ModuleSpec
    from types import SimpleNamespace
    from unittest.mock import MagicMock

    unused = ("accelerate", "datasets", "decord", "evaluate", "qwen_vl_utils", "torch")

    class Mocks(importlib.abc.MetaPathFinder, importlib.abc.Loader):
        """Stands for what evaluates, which asks nothing."""

        def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
            is_unused = name.partition(".")[0] in unused
            return ModuleSpec(name, self, is_package=True) if is_unused else None

        def create_module(self, spec: ModuleSpec) -> Any:
            return MagicMock(name=spec.name, __path__=[], __spec__=spec)

        def exec_module(self, module: Any) -> None:
            pass

    sys.meta_path.insert(0, Mocks())
    from accelerate import Accelerator

    Accelerator.return_value.num_processes = 1
    Accelerator.return_value.local_process_index = 0
    from lmms_eval.models.chat.openai import OpenAICompatible

    shown = Image.new("RGB", (32, 32), "white")
    medias = ({"type": "image", "url": shown}, {"type": "video", "url": "/tmp/a.mp4"})
    for media, by_url in zip(medias, (False, True), strict=True):
        model = OpenAICompatible(
            model_version="model",
            base_url=url + "/v1",
            api_key="none",
            max_retries=1,
            pass_video_url=by_url,
            enable_thinking_kwarg=False,
        )
        model.task_dict = {"task": {"test": [0]}}
        content = [media, {"type": "text", "text": QUESTION}]
        turns = [{"role": "user", "content": content}]
        settings = {"max_new_tokens": 60, "temperature": 0, "until": ["\n\n"]}
        told = (QUESTION, lambda doc, turns=turns: turns, settings, 0, "task", "test")
        model.generate_until([SimpleNamespace(args=told)])


CLIENTS = {
    one.__name__: one
    for one in (
        *(openai, langchain, litellm, instructor, pydantic_ai, openai_agents, mineru),
        *(docling, olmocr, marker, paddlex, lmms_eval),
    )
}

if __name__ == "__main__":
    CLIENTS[sys.argv[1]](sys.argv[2])
