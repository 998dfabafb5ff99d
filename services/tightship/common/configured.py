"""Commands of services, for which a bad option or variable is a configuration that no new start mends."""

from __future__ import annotations

import os

import click

# sysexits.h EX_CONFIG: whoever keeps a service running must not try again.
EX_CONFIG = 78


class _BadConfiguration(click.UsageError):
    exit_code = EX_CONFIG


def _told(error: click.UsageError) -> str:
    """With the variable, where the value may be from one."""
    variable = getattr(getattr(error, "param", None), "envvar", None)
    where = f" ({variable} is set)" if isinstance(variable, str) and variable in os.environ else ""
    return error.format_message() + where


class _Configured(click.Command):
    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            raise _BadConfiguration(_told(error), ctx) from None


class ServiceCommand(_Configured):
    """A service; it ends with EX_CONFIG where an option is wrong."""


class ServiceGroup(_Configured, click.Group):
    """The same, with commands beside the service."""


LOG_LEVEL = click.Choice(["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"], case_sensitive=False)
