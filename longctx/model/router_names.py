"""Names of what routers have: routers of transformers that can be watched, and options of shapes."""

ROUTERS = {
    "mixtral": "MixtralTopKRouter",
    "qwen3_moe": "Qwen3MoeTopKRouter",
    "olmoe": "OlmoeTopKRouter",
    "gpt_oss": "GptOssTopKRouter",
    "deepseek_v3": "DeepseekV3TopkRouter",
}
"""Model types, and classes of their routers, which return logits, weights and chosen experts."""
WITH_BIAS = ("deepseek_v3",)
"""Model types whose routers have a bias that only chooses experts."""
EXPERT_OPTIONS = {
    "num_experts_per_tok",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "first_dense_layers",
    "router_scores",
    "norm_topk_prob",
    "routed_scaling_factor",
    "router_bias",
}
"""Options of shapes that have no effect without experts."""
