"""Griffe extension for the reference: `rx.Hook` is the class, not an alias for type checkers."""

import griffe


class RealHook(griffe.Extension):
    """Shows the methods of `rx.Hook`."""

    def on_package(self, *, pkg: griffe.Module, **_: object) -> None:
        """Replace the alias once the package is read."""
        pkg.set_member("Hook", griffe.Alias("Hook", "replicax.train.hooks.hook.Hook"))
