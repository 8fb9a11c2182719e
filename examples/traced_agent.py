"""Where the time of an agent's answer goes: its spans of OpenTelemetry, printed as a tree.

The agent calls a retrieval tool and answers by a JSON schema. The starter model is too small to decide on calls, and
its chat template takes no tools. So a middleware makes the call for it, and hands the answer of the tool on.
"""

from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware, hook_config
from langchain.agents.structured_output import ProviderStrategy
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.tools import tool
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from pydantic import BaseModel, Field

from cacheblend_rag.app.collection import ARTICLES_PATH
from cacheblend_rag.langchain import ChatCacheBlend
from cacheblend_rag.retrieval.embedder import SentenceTransformerEmbeddings
from cacheblend_rag.retrieval.index import build_index

exporter, provider = InMemorySpanExporter(), TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(exporter))  # for a collector: an OTLP exporter
trace.set_tracer_provider(provider)
tracer = trace.get_tracer("traced_agent")

embedder = SentenceTransformerEmbeddings("minilm")
store = build_index(ARTICLES_PATH, embedder=embedder, index_dir="blend_data/index").index.store
retriever = store.as_retriever(search_kwargs={"k": 3})


class Answer(BaseModel, extra="forbid"):
    """The agent's answer."""

    sentence: str = Field(max_length=80)


@tool(response_format="content_and_artifact")
def look_up(query: str) -> tuple[str, list[Document]]:
    """Find passages of the articles."""
    with tracer.start_as_current_span("tool look_up"):
        found = retriever.invoke(query)
    return "\n\n".join(document.page_content for document in found), found


class LookUpFirst(AgentMiddleware):
    """Calls the tool with the question before the model is asked."""

    @hook_config(can_jump_to=["tools"])
    def before_model(self, state, runtime):
        """Go to the tool if the newest message is a question."""
        question = state["messages"][-1]
        if not isinstance(question, HumanMessage):
            return None
        call = {"name": "look_up", "args": {"query": question.text}, "id": question.id}
        return {"messages": [AIMessage("", tool_calls=[call])], "jump_to": "tools"}

    def wrap_model_call(self, request, handler):
        """Ask the model with the passages as instructions, and without tools."""
        question, _, passages = request.messages[-3:]
        instructions = "Use the following pieces of context to answer the question. Answer in a few words."
        told = SystemMessage(f"{instructions}\n\n{passages.text}")
        return handler(request.override(system_message=told, messages=[question], tools=[]))


def show(parent: int | None = None, depth: int = 0) -> None:
    """Print the spans below another as a tree."""
    spans = [one for one in exporter.get_finished_spans() if (one.parent and one.parent.span_id) == parent]
    for one in sorted(spans, key=lambda one: one.start_time):
        found = ""
        if one.name == "look up":
            found = (
                f"   {one.attributes['cacheblend.chunks_hit']} of {one.attributes['cacheblend.chunks']} chunks stored"
            )
        print(f"{'  ' * depth + one.name:<20}{(one.end_time - one.start_time) / 1e6:>8.1f} ms{found}")
        show(one.context.span_id, depth + 1)


chat = ChatCacheBlend.from_model_id("smollm2", store="blend_data/kv", max_new_tokens=120)
agent = create_agent(chat, [look_up], middleware=[LookUpFirst()], response_format=ProviderStrategy(Answer))
for _ in range(2):  # the first stores what the second reads
    exporter.clear()
    with tracer.start_as_current_span("agent"):
        answer = agent.invoke({"messages": [HumanMessage("When was Surtsey first seen?")]})
    chat.engine.flush()
    print(answer["structured_response"])
    show()
