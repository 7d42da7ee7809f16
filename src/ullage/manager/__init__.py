"""The resource manager: many jobs on shared GPUs, nothing lost. docs/manager.md says what it promises.

- `daemon.Daemon`: one daemon of one home; `orders.Orders`: all that can be asked of it
- `client.Client`: speaks to it
- `settings.read_settings`: the site's choices
"""
