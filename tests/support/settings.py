"""Arguments of `rx.fit`, from flat settings that tests vary one by one."""

from typing import Any

import replicax as rx


def grouped(settings: dict[str, Any]) -> dict[str, Any]:
    """`settings` with `save_every`, `keep`, ... as `saving`, `max_bad_steps` as `guard`, and so on.

    `save_seconds` None saves nothing; `audit` and `noise` are hooks.
    """
    settings = dict(settings)
    saving = {
        name: settings.pop(old)
        for old, name in (("save_every", "every"), ("keep", "keep"), ("keep_every", "keep_every"))
        if old in settings
    }
    if "save_seconds" in settings:
        seconds = settings.pop("save_seconds")
        saving["minutes"] = None if seconds is None else seconds / 60
    if saving:
        settings["saving"] = rx.Saving(**saving)
    guard = {
        name: settings.pop(name) for name in ("max_bad_steps", "skip_spikes") if name in settings
    }
    if guard:
        settings["guard"] = rx.Guard(**guard)
    evaluated = {
        name: settings.pop(old)
        for old, name in (("eval_batch_size", "batch_size"), ("eval_ema", "ema"))
        if old in settings
    }
    if evaluated:
        settings["eval_source"] = rx.Evaluation(settings["eval_source"], **evaluated)
    hooks = [settings.pop(name, None) for name in ("audit", "noise")]
    settings["hooks"] = [*settings.get("hooks", ()), *(hook for hook in hooks if hook is not None)]
    return settings
