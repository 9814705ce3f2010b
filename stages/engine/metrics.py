"""The engine's state as Prometheus text under vLLM's metric names."""

from __future__ import annotations

from stages.engine.loop import EngineLoop

_HELP = {
    "vllm:num_requests_running": ("gauge", "Number of requests in model execution batches."),
    "vllm:num_requests_waiting": ("gauge", "Number of requests waiting to be processed."),
    "vllm:kv_cache_usage_perc": ("gauge", "KV-cache usage. 1 means 100 percent usage."),
    "vllm:prefix_cache_queries_total": ("counter", "Prefix cache queries, in number of queried tokens."),
    "vllm:prefix_cache_hits_total": ("counter", "Prefix cache hits, in number of cached tokens."),
    "vllm:num_preemptions_total": ("counter", "Cumulative number of preemptions."),
    "vllm:prompt_tokens_total": ("counter", "Number of prefill tokens processed."),
    "vllm:generation_tokens_total": ("counter", "Number of generation tokens processed."),
}


def render_metrics(loop: EngineLoop, model: str) -> str:
    """Prometheus text format, one sample a metric, with vLLM's labels."""
    scheduler = loop.scheduler
    counters = scheduler.counters
    values = {
        "vllm:num_requests_running": scheduler.running,
        "vllm:num_requests_waiting": loop.queued,
        "vllm:kv_cache_usage_perc": scheduler.kv_usage,
        "vllm:prefix_cache_queries_total": counters.prefix_cache_queries,
        "vllm:prefix_cache_hits_total": counters.prefix_cache_hits,
        "vllm:num_preemptions_total": counters.preemptions,
        "vllm:prompt_tokens_total": counters.prompt_tokens,
        "vllm:generation_tokens_total": counters.generation_tokens,
    }
    name = model.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    lines = []
    for metric, value in values.items():
        kind, meaning = _HELP[metric]
        lines += [f"# HELP {metric} {meaning}", f"# TYPE {metric} {kind}"]
        lines.append(f'{metric}{{engine="0",model_name="{name}"}} {float(value)}')
    return "\n".join(lines) + "\n"
