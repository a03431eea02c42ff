"""Names of arguments and values in other libraries, and ours; and former names of arguments."""

from collections.abc import Container
from typing import Any

_DP, _FIT = "DataParallel(loss, optimizer, {})", "rx.fit(dp, state, source, {})"
_FEED, _JOB = "dp.feed(source, {})", "rx.initialize({})"
_LOGGERS = "logger loggers log_to report_to"
_GUARD, _SAVING = "guard=rx.Guard({})", "saving=rx.Saving({})"
ARGUMENTS = (
    ("DataParallel(loss, {})", "optimizer=optax.adam({})", "lr learning_rate peak_lr base_lr"),
    ("DataParallel(loss, {})", "optimizer={}", "tx opt optim"),
    ("DataParallel({}, optimizer)", "loss={}", "loss_fn loss_function criterion objective"),
    ("return values, {'name': rows} in the loss", "", "has_aux metrics compute_metrics"),
    (_DP, "mesh=rx.make_mesh({})", "devices num_devices gpus num_gpus n_gpus"),
    (_DP, "layout={}", "strategy sharding sharding_strategy parallelism"),
    (_DP, "layout='fsdp'", "fsdp zero"),
    (_DP, "precision={}", "dtype mixed_precision compute_dtype param_dtype"),
    (_DP, "precision='bfloat16'", "bf16"),
    (_DP, "precision='float16'", "fp16"),
    (_DP, "accumulate={}", "grad_accum gradient_accumulation gradient_accumulation_steps"),
    (_DP, "accumulate={}", "accumulation_steps accumulate_grad_batches every_k_schedule"),
    (_DP, "accumulate={}", "num_microbatches num_micro_batches microbatches micro_batches"),
    (_DP, "donate=True", "donate_argnums donate_argnames donate_state"),
    (_DP, "ema={}", "ema_decay"),
    ("state = dp.init(model)", "state=dp.init(model)", "model params train_state variables"),
    ("dp.init(model, {})", "seed={}", "key rng rngs random_seed random_state"),
    (_FEED, "batch_size={}", "bs batchsize global_batch_size train_batch_size"),
    (_FEED, "prefetch={}", "prefetch_size prefetch_factor buffer_size num_workers workers"),
    ("leave it out, as the last batch is padded", "", "drop_last drop_remainder"),
    (_FIT, "epochs={}", "num_epochs n_epochs max_epochs num_train_epochs"),
    (_FIT, "steps={}", "num_steps max_steps total_steps num_train_steps iterations"),
    ("rx.Evaluation(source, {})", "max_rows={}", "rows limit max_samples max_eval_samples"),
    ("rx.fit(dp, state, {})", "source={}", "data dataset dataloader train_data train_dataset"),
    ("rx.fit(dp, state, {})", "source={}", "train_dataloader train_loader batch batches rows"),
    ("rx.fit(dp, state, {})", "source={'x': x, 'y': y}", "x y labels targets"),
    (_FIT, "eval_source={}", "eval_data eval_dataset val_data validation_data test_data"),
    (_FIT, "eval_source={}", "validation val_dataset val_loader val_dataloader validation_source"),
    (_FIT, "eval_source={}", "val_dataloaders eval_dataloader eval_loader val_ds eval_ds test_ds"),
    (_FIT, "hooks=[{}]", "hook callback callbacks"),
    (_FIT, "hooks=[{}]", _LOGGERS),
    (_FIT, "hooks=[rx.hooks.EarlyStopping()]", "early_stopping patience early_stopping_patience"),
    (_FIT, "log_every={}", "log_steps logging_steps log_every_n_steps log_interval"),
    (_FIT, "steps_per_call={}", "steps_per_execution steps_per_loop iterations_per_loop"),
    (_FIT, "run_dir='runs/name'", "run workdir log_dir output_dir ckpt_dir checkpoint_dir resume"),
    (_FIT, "run_dir='runs/name'", "resume_from_checkpoint resume_from ckpt_path default_root_dir"),
    (_SAVING, "every={}", "save_every every_steps save_steps save_interval_steps"),
    (_SAVING, "every={}", "checkpoint_every checkpoint_interval every_n_train_steps save_interval"),
    (_SAVING, "keep={}", "max_to_keep save_total_limit keep_last save_top_k num_to_keep"),
    (_SAVING, "keep_every={}", "keep_period"),
    (_GUARD, "max_bad_steps={}", "most max_consecutive_errors"),
    (_GUARD, "skip_spikes={}", "spikes"),
    (_FIT, "progress=False", "verbose progress_bar enable_progress_bar show_progress"),
    ("rx.hooks.EarlyStopping({})", "metric={}", "monitor metric_for_best_model"),
    ("rx.hooks.EarlyStopping({})", "min_delta={}", "least early_stopping_threshold"),
    ("rx.Evaluation(source, {})", "every_steps={}", "eval_steps eval_every eval_interval"),
    ("rx.hooks.TensorBoard({})", "folder={}", "log_dir logdir"),
    ("rx.hooks.CSV({})", "path={}", "filename file log_file"),
    ("rx.hooks.MLflow({})", "uri={}", "tracking_uri"),
    ("rx.hooks.MLflow({})", "experiment={}", "experiment_name"),
    ("dp.predict(state, source, {})", "function={}", "fn func apply_fn predict_fn"),
    ("rx.plan(dp, model, source, {})", "target={}", "hardware device accelerator"),
    ("rx.load({})", "run_dir={}", "path folder checkpoint checkpoint_path ckpt_path"),
    (_JOB, "coordinator={}", "coordinator_address master_addr"),
    (_JOB, "processes={}", "num_processes world_size nnodes num_nodes"),
    (_JOB, "process={}", "process_id process_index rank"),
    ("rx.make_mesh({})", "data={}", "devices num_devices gpus num_gpus n_gpus"),
    ("rx.make_mesh({})", "model={}", "tp tensor tensor_parallel model_parallel"),
    ("rx.make_mesh({})", "stage={}", "pp pipe pipeline stages pipeline_parallel"),
    ("rx.load", "call rx.load_model(run_dir, model) for the model alone", "model"),
)
"""Where an argument belongs, the argument, and its names in other libraries. Without an argument,
what to do instead; with a function alone, what that one says."""

VALUES = {
    "16": "float16",
    "16-mixed": "float16",
    "32": "float32",
    "bf16": "bfloat16",
    "bf16-mixed": "bfloat16",
    "data_parallel": "replicated",
    "ddp": "replicated",
    "dp": "replicated",
    "fp16": "float16",
    "fp32": "float32",
    "full_shard": "fsdp",
    "half": "float16",
    "hsdp": "fsdp",
    "mirrored": "replicated",
    "shard_grad_op": "zero1",
    "zero2": "zero1",
    "zero3": "fsdp",
}
"""Values of arguments, by their names in other libraries."""


_OUR_LOGGERS = {
    name.lower(): f"rx.hooks.{name}()"
    for name in ("TensorBoard", "WandB", "MLflow", "Comet", "Trackio", "CSV")
}


def loggers(word: str, value: Any) -> str | None:
    """Return our loggers for those in an argument, if `word` names one of loggers."""
    if word not in _LOGGERS.split():
        return None
    found = []
    for each in value if isinstance(value, list | tuple) else [value]:
        name = each if isinstance(each, str) else getattr(each, "__name__", type(each).__name__)
        found.append(
            _OUR_LOGGERS.get(name.lower().removesuffix("logger"), "rx.hooks.TensorBoard()")
        )
    return ", ".join(dict.fromkeys(found))


def names_of_row(written: str, words: str) -> list[str]:
    """Return our name of a row's argument, if its value stays as it is, and the other names."""
    name, _, value = written.partition("=")
    return [*([name] if value == "{}" else []), *words.split()]


def alike(word: str, known: Container[str]) -> list[str]:
    """Return the names in `known` that mean what `word` does in other libraries."""
    rows = [(written.partition("=")[0], words.split()) for _, written, words in ARGUMENTS]
    return [
        name
        for ours, words in rows
        if word in (ours, *words)
        for name in (ours, *words)
        if name in known and name != word
    ]


def is_of_others(word: str) -> bool:
    """Whether other libraries have an argument of this name, and what it does is known."""
    return any(word in words.split() for _, _, words in ARGUMENTS)
