"""How the end of a job is told: by a command, a webhook or a mail. Each may take seconds, so no loop calls these.

Nothing that a user named is reached with more than that user's rights: a job's own command runs as its user, and a URL
has to begin as the site's settings allow. Redirects are not followed and proxies are not asked, so what is called is
what was checked.
"""

from __future__ import annotations

import http.client
import json
import smtplib
import subprocess
from collections.abc import Mapping, Sequence
from email.message import EmailMessage
from typing import Any, NamedTuple
from urllib.parse import SplitResult, urlsplit

from ullage.errors import InvalidValue
from ullage.manager.settings import NotifySettings
from ullage.sandbox.environment import environment
from ullage.sandbox.limits import Limits
from ullage.sandbox.parent import run
from ullage.units import GIB, format_duration

_LARGEST_ANSWER = 1 << 16
_BUSY = (408, 425, 429)  # answers of 400 and more that ask to try again
_COMMAND = "ullage.sandbox.command:run_command"


class DeliveryResult(NamedTuple):
    """Whether it was delivered, what is known of it, and whether another try may do better."""

    done: bool
    text: str
    again: bool = False


def by_command(
    command: Sequence[str], facts: Mapping[str, Any], env: Mapping[str, str], cwd: str | None,
    rights: Mapping[str, int | str], seconds: float,
) -> DeliveryResult:  # fmt: skip
    """Run a command. One that ran is not run again, whatever came of it."""
    request = {"command": list(command), "text": json.dumps(facts), "env": dict(env) | variables(facts)}
    limits = Limits(seconds=seconds, memory=4 * GIB, processes=256)
    outcome = run(_COMMAND, request, limits=limits, env=environment(env), cwd=cwd, rights=rights or None)
    if outcome.answer is None:
        return DeliveryResult(False, f"{command[0]}: {'' if outcome.reason == 'error' else 'it '}{outcome.failure}")
    if "failed" in outcome.answer:
        return DeliveryResult(False, outcome.answer["failed"])
    return DeliveryResult(True, f"{command[0]}: exit code {outcome.answer['code']}")


def variables(facts: Mapping[str, Any]) -> dict[str, str]:
    """The facts as environment variables; what is unknown is empty.

    >>> variables({"job": 7, "exit_code": None})
    {'ULLAGE_END_JOB': '7', 'ULLAGE_END_EXIT_CODE': ''}
    """
    return {f"ULLAGE_END_{name.upper()}": "" if value is None else str(value) for name, value in facts.items()}


def by_webhook(url: str, facts: Mapping[str, Any], settings: NotifySettings) -> DeliveryResult:
    """POST the facts as JSON."""
    try:
        parts = allowed_url(url, settings.webhooks)
    except InvalidValue as error:  # the settings have changed since it was asked for
        return DeliveryResult(False, str(error))
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=settings.webhook_timeout)
    headers = {"Content-Type": "application/json", "User-Agent": "ullage", "Ullage-Delivery": str(facts["id"])}
    try:
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        connection.request("POST", target, json.dumps(facts).encode(), headers)
        answer = connection.getresponse()
        answer.read(_LARGEST_ANSWER)
    except (OSError, http.client.HTTPException, ValueError) as error:
        return DeliveryResult(False, f"{parts.hostname}: {error or type(error).__name__}", again=True)
    finally:
        connection.close()
    if 200 <= answer.status < 300:
        return DeliveryResult(True, f"{parts.hostname} answered {answer.status}")
    again = answer.status >= 500 or answer.status in _BUSY
    return DeliveryResult(False, f"{parts.hostname} answered {answer.status}", again)


def allowed_url(url: str, prefixes: Sequence[str]) -> SplitResult:
    """The parts of a URL that begins as one of the prefixes does: same scheme, host and port, and a path below theirs.

    >>> allowed_url("https://chat.example.org/hooks/7", ["https://chat.example.org/hooks/"]).hostname
    'chat.example.org'
    >>> allowed_url("https://chat.example.org.evil.net/hooks/7", ["https://chat.example.org/hooks/"])
    Traceback (most recent call last):
    ullage.errors.InvalidValue: needed a webhook that begins with https://chat.example.org/hooks/ \
(notify.webhooks in the settings); found 'https://chat.example.org.evil.net/hooks/7'
    """
    parts = _split(url)
    if parts is not None and any(_begins(parts, _split(prefix)) for prefix in prefixes):
        return parts
    needed = f"a webhook that begins with {' or '.join(prefixes)}" if prefixes else "no webhook: this site allows none"
    raise InvalidValue(f"needed {needed} (notify.webhooks in the settings); found {url[:200]!r}")


def _split(url: str) -> SplitResult | None:
    """The parts of a URL that means one thing to everybody; None of any other."""
    try:
        parts = urlsplit(url)
        _ = parts.port  # which is refused if it is no number
    except ValueError:
        return None
    plain = url.isascii() and url.isprintable() and not set(url) & set(" \\<>\"'")
    steps = parts.path.lower().replace("%2e", ".").replace("%2f", "/").split("/")
    known = parts.scheme in ("http", "https") and parts.hostname and "@" not in parts.netloc and not parts.fragment
    return parts if plain and known and ".." not in steps and "." not in steps else None


def _begins(url: SplitResult, prefix: SplitResult | None) -> bool:
    if prefix is None or (url.scheme, url.hostname, _port(url)) != (prefix.scheme, prefix.hostname, _port(prefix)):
        return False
    folder = prefix.path if prefix.path.endswith("/") else f"{prefix.path}/"
    return url.path == prefix.path or (url.path or "/").startswith(folder)


def _port(parts: SplitResult) -> int:
    return parts.port or (443 if parts.scheme == "https" else 80)


def by_mail(address: str, facts: Mapping[str, Any], settings: NotifySettings) -> DeliveryResult:
    """Send a mail by SMTP or through sendmail, as the site's settings have it."""
    message = EmailMessage()
    message["From"], message["To"] = settings.sender, address
    message["Subject"] = f"Job {facts['job']} ({facts['name']}) is {facts['state']}"
    message["Message-ID"] = f"<ullage-{facts['id']}@{settings.sender.rpartition('@')[2]}>"
    ran = f"It ran for {format_duration(facts['ran'])}." if facts["started"] else "It never ran."
    why = f" ({facts['cause']})" if facts["cause"] and facts["cause"] != "finished" else ""
    message.set_content(
        f"Job {facts['job']} ({facts['name']}) of {facts['user']} is {facts['state']}{why}. {ran}\n\n"
        f"ullage status {facts['job']}\nullage logs {facts['job']}\n"
    )
    try:
        if settings.smtp is not None:
            host, _, port = settings.smtp.rpartition(":")
            with smtplib.SMTP(host, int(port), timeout=settings.mail_timeout) as server:
                if settings.smtp_tls:
                    server.starttls()
                server.send_message(message)
        else:
            command = [settings.sendmail or "sendmail", "-t", "-oi"]
            subprocess.run(
                command, input=message.as_bytes(), check=True, capture_output=True, timeout=settings.mail_timeout
            )
    except smtplib.SMTPResponseException as error:
        return DeliveryResult(False, f"the mail server answered {error.smtp_code}", again=error.smtp_code < 500)
    except (OSError, smtplib.SMTPException, subprocess.SubprocessError) as error:
        return DeliveryResult(False, f"the mail could not be sent: {type(error).__name__}", again=True)
    return DeliveryResult(True, f"mail to {address}")
