"""Keys of `config.json` that are no part of the model's function, and switches that must stand off.

Every other key that `config_reading.py` does not ask for is refused by its name: new keys appear with new kinds of
models, and to pass over one is to compute another function than its authors did.
"""

from typing import Any

ENVELOPE = frozenset(
    "model_type architectures dtype torch_dtype tie_word_embeddings bos_token_id eos_token_id pad_token_id".split()
)
"""Keys of every family, the native one included."""

HARMLESS = frozenset(
    # who wrote the file, and with what
    "_name_or_path name_or_path _commit_hash transformers_version transformers.js_config tokenizer_class "
    "unsloth_fixed unsloth_version is_llama_config finetuning_task task_specific_params prefix "
    # how the numbers came about, not what they do; pretraining_tp splits the same sums
    "initializer_range gradient_checkpointing pretraining_tp "
    # how a run stores and returns things
    "use_cache cache_implementation output_attentions output_hidden_states output_scores return_dict "
    "return_dict_in_generate torchscript use_bfloat16 chunk_size_feed_forward attn_implementation _attn_implementation "
    "_attn_implementation_autoset _attn_implementation_internal _flash_attn_2_enabled keys_to_ignore_at_inference "
    "is_decoder tf_legacy_loss "
    # heads for other tasks
    "id2label label2id num_labels problem_type "
    # ids and sampling, which generation reads from generation_config.json
    "sep_token_id unk_token_id cls_token_id mask_token_id decoder_start_token_id forced_bos_token_id "
    "forced_eos_token_id suppress_tokens begin_suppress_tokens bad_words_ids max_length min_length max_new_tokens "
    "do_sample early_stopping num_beams num_beam_groups num_return_sequences diversity_penalty temperature top_k top_p "
    "typical_p repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size "
    "exponential_decay_length_penalty remove_invalid_values".split()
)
"""Keys that change no logit."""

HARMLESS_IN: dict[str, frozenset[str]] = {
    # n_ctx repeats n_positions; the summary is a head for other tasks; upcasting changes the last bits only.
    "gpt2": frozenset(
        "n_ctx reorder_and_upcast_attn summary_type summary_use_proj summary_activation summary_proj_to_labels "
        "summary_first_dropout".split()
    ),
    "llama": frozenset(("attention_bias", "mlp_bias")),  # read
}
"""Keys that change no logit of one family."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
    "is_encoder_decoder": (False,),
    "tie_encoder_decoder": (False,),
    "pruned_heads": ({},),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "partial_rotary_factor": (1.0,),
    "rope_interleaved": (False,),
    "use_mrope": (False,),
    "use_qk_norm": (False,),
}
"""Switches of other models, with the values at which they change nothing."""
