"""A mutating webhook for Kubernetes: pods that say what they train get the GPU memory that it takes.

A pod says it in an annotation, as JSON for `POST /v1/estimates`:

    ullage/question: '{"model": "torchvision:resnet50", "options": {"batch_size": 64}, "gpu": "A100-40GB"}'

A pod of KAI's scheduler gets the annotation `gpu-memory`; a container that asks for `nvidia.com/gpu` gets HAMi's
`nvidia.com/gpumem`; both are in MiB. What a pod says itself is left as it is. A pod that fits on none of the GPUs is
refused; one that cannot be estimated in time is admitted with a warning. `python -m ullage.adapters.kubernetes` serves
it.
"""

from __future__ import annotations

import argparse
import base64
import http.server
import json
import ssl
from typing import Any

from ullage.adapters.service import Ask, daemon, needs_of, smallest
from ullage.errors import InvalidValue, UllageError
from ullage.units import MIB

QUESTION = "ullage/question"
KAI, KAI_MEMORY = "kai-scheduler", "gpu-memory"
HAMI, HAMI_MEMORY = "nvidia.com/gpu", "nvidia.com/gpumem"
_PATIENCE = 8.0  # seconds; Kubernetes waits 10 by default
_LARGEST = 4 << 20  # bytes


class PatientAsker:
    """Asks the daemon and waits for a few seconds. An answer that comes later is there when the same is asked again."""

    def __init__(self, patience: float = _PATIENCE) -> None:
        self._patience = patience
        self._asked: dict[str, str] = {}  # ids by question

    def __call__(self, question: dict[str, Any]) -> dict[str, Any]:
        """The answer; `InvalidValue` if it is not there in time."""
        key = json.dumps(question, sort_keys=True)
        with daemon() as client:
            if key not in self._asked:
                self._asked[key] = client.call("estimate", question={"details": False, **question})["id"]
            answer = client.estimated(self._asked[key], self._patience)
        if answer["state"] == "failed":
            del self._asked[key]  # the next one may do better
        return answer


def review(asked: dict[str, Any], ask: Ask) -> dict[str, Any]:
    """The answer to an AdmissionReview of `admission.k8s.io/v1`, with a JSONPatch where there is something to set."""
    request = asked["request"]
    response: dict[str, Any] = {"uid": request["uid"], "allowed": True}
    try:
        patch = patch_of(request["object"], ask) if request["kind"]["kind"] == "Pod" else []
        if patch:
            response |= {"patchType": "JSONPatch", "patch": base64.b64encode(json.dumps(patch).encode()).decode()}
    except NeverFits as error:
        response |= {"allowed": False, "status": {"code": 403, "message": f"ullage: {error}"}}
    except (UllageError, TimeoutError, OSError) as error:
        response["warnings"] = [f"ullage: {' '.join(str(error).split())}"[:250]]
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": response}


class NeverFits(InvalidValue):
    """The pod fits on none of the GPUs that it could run on."""


def patch_of(pod: dict[str, Any], ask: Ask) -> list[dict[str, Any]]:
    """What to set in a pod; nothing for one that says nothing, or says how much itself."""
    notes = pod.get("metadata", {}).get("annotations") or {}
    spec = pod.get("spec", {})
    kai = spec.get("schedulerName") == KAI
    containers = [] if kai else [place for place, each in enumerate(spec.get("containers", [])) if _wants(each)]
    if QUESTION not in notes or kai and KAI_MEMORY in notes or not kai and not containers:
        return []
    try:
        question = dict(json.loads(notes[QUESTION]))
    except (ValueError, TypeError):
        raise InvalidValue(f"{QUESTION}: needed a question as JSON; found {notes[QUESTION][:80]!r}") from None
    needs = needs_of(ask(question))
    try:
        memory = -(-smallest(needs).upper // MIB)
    except InvalidValue as error:
        raise NeverFits(str(error)) from None
    if kai:
        return [{"op": "add", "path": f"/metadata/annotations/{_escaped(KAI_MEMORY)}", "value": str(memory)}]
    place = "/spec/containers/{}/resources/limits/" + _escaped(HAMI_MEMORY)
    return [{"op": "add", "path": place.format(number), "value": str(memory)} for number in containers]


def _wants(container: dict[str, Any]) -> bool:
    """Whether HAMi is to give a container a GPU, and is not told how much of it."""
    limits = (container.get("resources") or {}).get("limits") or {}
    return HAMI in limits and HAMI_MEMORY not in limits


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


class _Handler(http.server.BaseHTTPRequestHandler):
    ask: Ask = PatientAsker()

    def do_POST(self) -> None:
        try:
            length = int(self.headers.get("Content-Length", "0"))
            if not 0 < length <= _LARGEST:
                raise ValueError("its length")
            code, answer = 200, review(json.loads(self.rfile.read(length)), self.ask)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            code, answer = 400, {"message": f"needed an AdmissionReview of admission.k8s.io/v1; found none ({error})"}
        body = json.dumps(answer).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def server(port: int, certificate: str | None = None, key: str | None = None) -> http.server.ThreadingHTTPServer:
    """A server of the webhook. Kubernetes speaks to one with a certificate only."""
    made = http.server.ThreadingHTTPServer(("", port), _Handler)
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        made.socket = context.wrap_socket(made.socket, server_side=True)
    return made


def main() -> None:
    """Serve until it is ended."""
    parser = argparse.ArgumentParser(prog="python -m ullage.adapters.kubernetes", description=(__doc__ or "")[:79])
    parser.add_argument("--port", type=int, default=8443)
    parser.add_argument("--certificate", required=True, help="the server's certificate, PEM")
    parser.add_argument("--key", required=True, help="its key, PEM")
    asked = parser.parse_args()
    server(asked.port, asked.certificate, asked.key).serve_forever()


if __name__ == "__main__":
    main()
