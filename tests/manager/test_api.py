"""The REST API of a real daemon: what it answers, to whom, and that nothing sent to it ends the daemon."""

import asyncio
import contextlib
import json
import os
import pwd
import socket
import stat
import subprocess
import sys
import time
from urllib.parse import urlsplit

import pytest
import requests
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from prometheus_client.parser import text_string_to_metric_families

import ullage
import ullage.manager
from ullage.errors import InvalidValue, JobNotFound, NoDaemon, NotAllowed
from ullage.manager.api.gate import Gate
from ullage.manager.api.server import parse_listen
from ullage.manager.core.context import ServiceState
from ullage.manager.identity import Caller
from ullage.manager.verbs import VERBS

FUZZ = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))


class Api:
    """A home whose daemon serves the API."""

    def __init__(self, home):
        self.home = home
        home.options += ["--api", "0"]
        home.start()
        self.refresh()

    def refresh(self):
        run = self.home.folder / "run"
        self.home.until(lambda: (run / "api.json").exists() and self.home.answers(), "the API")
        self.url = json.loads((run / "api.json").read_text())["url"]
        self.token = (run / "api-token").read_text().strip()
        self.headers = {"Authorization": f"Bearer {self.token}"}
        self.client = ullage.manager.Client(url=self.url, token=self.token)

    def get(self, path, **more):
        return requests.get(self.url + path, headers=self.headers, timeout=60, **more)

    def post(self, path, **more):
        return requests.post(self.url + path, headers=self.headers, timeout=60, **more)


@pytest.fixture(scope="module")
def api(make_home, tmp_path_factory):
    home = make_home(tmp_path_factory.mktemp("api") / "h")
    yield Api(home)
    home.close()


@pytest.fixture(autouse=True)
def _the_daemon_stays_up(api):
    pid = api.home.process.pid
    yield
    assert api.home.process.poll() is None and api.client.ping()["pid"] == pid


def problem(answer, status):
    """The one message of an answer that refuses."""
    assert answer.status_code == status, answer.text
    found = answer.json()
    assert set(found) == {"error", "message"} and "\n" not in found["message"] and len(found["message"]) < 500
    return found["message"]


def test_a_token_is_needed_and_is_kept_from_others(api):
    file = api.home.folder / "run/api-token"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE((api.home.folder / "manager/api-secret").stat().st_mode) == 0o600
    assert "got none" in problem(requests.get(api.url + "/v1/ping", timeout=60), 401)
    user, signature = api.token.split("-")[1:]
    changed = api.token[:-1] + ("0" if api.token[-1] != "0" else "1")
    for token in ("x", "", "ullage_", "ullage_x", changed, f"ullage-{int(user) + 1}-{signature}"):
        for path in ("/v1/ping", "/metrics", "/v1/events/stream", "/v1/jobs/1/logs"):
            answer = requests.get(api.url + path, headers={"Authorization": f"Bearer {token}"}, timeout=60)
            problem(answer, 401)
    with pytest.raises(NotAllowed, match="Authorization"):
        ullage.manager.Client(url=api.url, token="wrong").queue()
    given = api.home.client.call("api")
    assert given == {"url": api.url, "token": api.token}


@pytest.mark.parametrize("way", ["socket", "api"])
def test_a_job_from_submission_to_its_end(api, way):
    client = api.client if way == "api" else ullage.manager.Client(api.home.folder)
    [job] = client.submit(["sh", "-c", "echo out; echo err >&2"], memory="1GiB", name=f"by {way}", cwd=api.home.work)
    ended = client.wait(job, timeout=60)
    assert (ended["state"], ended["cause"], ended["promise"]) == ("done", "finished", 1 << 30)
    assert client.logs(job) == "out\n" and client.logs(job, "stderr") == "err\n"
    assert "".join(client.follow(job)) == "out\n"
    assert [each["id"] for each in client.history(limit=1)] == [job]
    assert client.status(f"by {way}")["attempts"][0]["exit_code"] == 0
    kinds = [event["kind"] for event in client.events() if event["job"] == job]
    assert kinds[0] == "submitted" and kinds[-1] == "done"


def test_jobs_that_wait_are_changed(api):
    jobs = api.client.submit(["true"], memory="1GiB", array="1-3", hold=True)
    assert len(jobs) == 3 and {job["id"] for job in api.client.queue()} >= set(jobs)
    assert api.client.release(jobs[0])[0]["done"]
    assert api.client.wait(jobs[0], timeout=60)["state"] == "done"
    assert [each["text"] for each in api.client.cancel(*jobs[1:])] == ["cancelled"] * 2
    assert not api.client.hold(jobs[0])[0]["done"]
    with pytest.raises(TimeoutError):
        held = api.client.submit(["true"], hold=True)[0]
        api.client.wait(held, timeout=0.2)
    api.client.cancel(held)


def test_the_same_key_makes_no_second_job(api):
    first = api.client.submit(["true"], key="a key of mine", memory="1GiB")
    assert api.client.submit(["true"], key="a key of mine", memory="1GiB") == first
    api.client.wait(first[0], timeout=60)  # the tests below count what happens to their own jobs


def test_a_job_file_is_submitted(api, tmp_path):
    (tmp_path / "job.toml").write_text("command = 'sh -c \"pwd; echo $WORD\"'\nmemory = '2GiB'\nenv.WORD = 'said'\n")
    [job] = api.client.submit(tmp_path / "job.toml", cwd=str(tmp_path), env={"PATH": os.environ["PATH"]})
    assert api.client.wait(job, timeout=60)["promise"] == 2 << 30
    assert api.client.logs(job) == f"{tmp_path}\nsaid\n"
    with pytest.raises(InvalidValue, match="there is no 'gpuss'; did you mean 'gpus'"):
        api.client.submit(["true"], gpuss=2)


def test_gpus_are_drained_and_resumed(api):
    first = api.client.gpus()[0]
    assert first["activity"]["smact"] == 0 and first["activity"]["drama"] is None  # a virtual one, without jobs
    assert first["used"] == 0
    assert api.client.drain(first["id"], "dust")["drained"]
    api.home.until(lambda: api.client.gpus()[0]["drained"], "the GPU to be drained")
    assert api.client.gpus()[0]["drain_reason"] == "dust"
    assert api.client.resume(0) == {"gpu": first["id"], "index": 0, "drained": False, "text": ""}
    with pytest.raises(InvalidValue, match="the GPU must be named by index or UUID"):
        api.client.drain("none")


def test_events_are_streamed_and_go_on_after_a_break(api):
    since = api.client.ping()["last_event"]
    with api.get(f"/v1/events/stream?since={since}", stream=True) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        [job] = api.client.submit(["true"], memory="1GiB")
        seen = []
        for line in answer.iter_lines(decode_unicode=True):
            if line.startswith("data: "):
                seen.append(json.loads(line.removeprefix("data: ")))
                if seen[-1]["kind"] == "done":
                    break
    assert {event["job"] for event in seen} == {job} and seen[0]["kind"] == "submitted"
    headers = api.headers | {"Last-Event-ID": str(seen[0]["id"])}
    with requests.get(f"{api.url}/v1/events/stream", headers=headers, stream=True, timeout=60) as answer:
        assert next(answer.iter_lines(decode_unicode=True)) == f"id: {seen[1]['id']}"


def test_metrics_can_be_read_and_unknown_is_left_out(api):
    [job] = api.client.submit(["true"], memory="1GiB")
    api.client.wait(job, timeout=60)
    families = {family.name: family for family in text_string_to_metric_families(api.get("/metrics").text)}
    states = {sample.labels["state"]: sample.value for sample in families["ullage_jobs"].samples}
    assert states["done"] >= 1 and states["running"] == 0 and len(states) == 8
    assert {sample.labels["cause"] for sample in families["ullage_attempts"].samples} >= {"finished"}
    assert len(families["ullage_gpu_memory_total_bytes"].samples) == 2
    assert {sample.labels["kind"] for sample in families["ullage_gpu_activity_ratio"].samples} == {"gract", "smact"}
    assert not families["ullage_gpu_power_watts"].samples
    assert families["ullage_info"].samples[0].labels["policy"] == "ullage"


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        (b"", 422, "body is missing"),
        (b"{", 422, "the body must be JSON"),
        (b"[]", 422, ""),
        (b"\xff\xfe", 422, "the body must be JSON"),
        (b"[" * 100_000, 400, ""),
        (b'{"job": {"cwd": "/"}}', 422, "job.command is missing"),
        (b'{"job": {"comand": ["a"], "cwd": "/"}}', 422, "there is no 'job.comand'; did you mean 'command'?"),
        (b'{"job": {"command": [], "cwd": "/"}}', 422, "job.command: list should have at least 1 item"),
        (b'{"job": {"command": ["a"], "cwd": "x"}}', 422, "job.cwd: path must be absolute, got 'x'"),
        (b'{"job": {"command": ["\\ud800"], "cwd": "/"}}', 422, "job.command.0: "),
        (b'{"job": {"command": ["a"], "cwd": "/", "gpus": 99}}', 400, "the job asks for 99 GPUs; there are 2"),
        (b'{"job": {"command": ["a"], "cwd": "/", "memory": 1e308}}', 422, "job.memory: "),
        (b'{"job": {"command": ["a"], "cwd": "/", "after": [{"job": 999999}]}}', 404, "no job 999999"),
        (b'{"job": {"command": ["a"], "cwd": "/"}, "key": "short"}', 422, "key: string should have at least 8"),
        (b'{"job": {"command": ["' + b"a" * (5 << 20) + b'"], "cwd": "/"}}', 413, "a request must have at most"),
    ],
)
def test_a_bad_submission_gets_one_message(api, body, status, said):
    answer = requests.post(
        api.url + "/v1/jobs", headers=api.headers | {"Content-Type": "application/json"}, data=body, timeout=60
    )
    assert said in problem(answer, status)


def test_a_body_that_never_says_its_length_is_cut(api):
    def pieces():
        for _ in range(64):
            yield b" " * (1 << 17)

    try:
        answer = requests.post(
            api.url + "/v1/jobs", headers=api.headers | {"Content-Type": "application/json"}, data=pieces(), timeout=60
        )
    except requests.ConnectionError:
        return  # the daemon did not read on, and the rest could not be sent
    problem(answer, 413)


def test_paths_and_jobs_that_are_not_there(api):
    assert "openapi.json" in problem(api.get("/nothing"), 404)
    assert "openapi.json" in problem(requests.delete(api.url + "/v1/jobs", headers=api.headers, timeout=60), 405)
    assert "no job 999999" in problem(api.get("/v1/jobs/999999"), 404)
    problem(api.get("/v1/jobs/" + "9" * 150), 404)
    problem(api.get("/v1/jobs/1/logs?stream=both"), 422)
    problem(api.get("/v1/events?since=-1"), 422)
    assert problem(api.get("/v1/history?limt=5"), 422) == "there is no 'limt' in this query; did you mean 'limit'?"
    with pytest.raises(JobNotFound):
        api.client.status("not there, at all?")


def test_its_description_is_complete_and_needs_a_token(api):
    for path in ("/openapi.json", "/docs", "/redoc", "/nothing", "/v1/jobs"):
        assert "got none" in problem(requests.get(api.url + path, timeout=60), 401)
    assert "got none" in problem(requests.post(api.url + "/v1/jobs", data=b"x" * (5 << 20), timeout=60), 401)
    paths = api.get("/openapi.json").json()["paths"]
    assert {verb.path for verb in VERBS.values() if not verb.local} <= set(paths)
    assert all("security" in operation for path in paths.values() for operation in path.values())


def test_orders_for_the_socket_do_not_exist_on_tcp(api):
    assert api.home.client.call("api")["url"] == api.url
    for verb in [verb for verb in VERBS.values() if verb.local]:
        problem(requests.request(verb.method, api.url + verb.path, headers=api.headers, timeout=60), 404)


def test_one_request_changes_several_jobs(api):
    jobs = api.client.submit(["true"], memory="1GiB", array="1-3", hold=True)
    answer = requests.patch(
        api.url + "/v1/jobs", headers=api.headers, json={"jobs": jobs[1:], "changes": {"priority": -5}}, timeout=60
    )
    assert [each["job"] for each in answer.json()] == jobs[1:]
    assert [api.client.status(job)["priority"] for job in jobs] == [0, -5, -5]
    assert len(api.post("/v1/jobs/cancel", json={"jobs": jobs}).json()) == 3
    assert problem(api.post("/v1/jobs/cancel", json={"jobs": jobs, "job": 1}), 422) == (
        "there is no 'job'; did you mean 'jobs'?"
    )
    assert problem(api.post("/v1/jobs/cancel", json={}), 422) == "jobs is missing"


def test_health_needs_no_token_and_tells_nothing_else(api):
    answer = requests.get(api.url + "/health", timeout=60)
    assert answer.status_code == 200 and answer.json() == {"status": "ok"}
    assert requests.post(api.url + "/health", timeout=60).status_code == 401


def test_a_daemon_that_is_not_well_says_so():
    service = ServiceState(began=0.0)
    assert service.health() == "ok"
    service.trouble = "the disk is full"
    assert service.health() == "trouble"
    service.stepped -= 3600.0
    assert service.health() == "stuck"
    service.end()
    assert service.health() == "ending"

    async def asked() -> list[dict]:
        said: list[dict] = []

        async def hear(message: dict) -> None:
            said.append(message)

        gate = Gate(None, lambda token: None, 1, service.health)
        await gate({"type": "http", "path": "/health", "method": "GET", "headers": []}, None, hear)
        return said

    assert asyncio.run(asked())[0]["status"] == 503


@pytest.mark.slow
def test_the_api_is_as_it_describes_itself_whatever_is_sent(api):
    """Each operation with requests that fit its description and with such that do not; answers must fit it too."""
    import schemathesis
    from schemathesis.specs.openapi.checks import negative_data_rejection, positive_data_acceptance

    # Some rules (an absolute path, GPUs that are there) are beyond what a description can say; 5 in a query is text.
    not_to_be_told = [positive_data_acceptance, negative_data_rejection]
    for gpu in api.client.gpus():
        api.client.drain(gpu["id"], "nothing that is made up here is to run")
    tried = []
    for found in schemathesis.openapi.from_url(api.url + "/openapi.json", headers=api.headers).get_all_operations():
        operation = found.ok()
        if operation.path == "/v1/events/stream":
            continue  # which never ends

        for mode in schemathesis.GenerationMode:

            @settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck), database=None)
            @given(case=operation.as_strategy(generation_mode=mode))
            def one(case):
                if case.path.endswith("/resume") or case.query and "wait" in case.query:
                    return  # what is drained stays so, and nobody waits
                case.call_and_validate(headers=api.headers, timeout=60, excluded_checks=not_to_be_told)

            with contextlib.suppress(Unsatisfiable):  # some requests cannot be wrong
                one()
                tried.append((operation.method, operation.path, mode))
    for gpu in api.client.gpus():
        api.client.resume(gpu["id"])
    assert len({path for _, path, _ in tried}) >= 12


@FUZZ
@given(
    line=st.sampled_from(
        [b"", b"GET / HTTP/1.1\r\n", b"POST /v1/jobs HTTP/1.1\r\nHost: a\r\nContent-Length: 99\r\n\r\n"]
    ),
    rest=st.binary(max_size=2000),
)
def test_any_bytes_leave_the_api_answering(api, line, rest):
    parts = urlsplit(api.url)
    with socket.create_connection((parts.hostname, parts.port), timeout=60) as connection:
        connection.sendall(line + rest)
        connection.shutdown(socket.SHUT_WR)
        with contextlib.suppress(OSError):
            connection.recv(1 << 16)
    assert api.get("/v1/ping").status_code == 200


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=30),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=10), inner, max_size=3),
    max_leaves=8,
)
_NAMES = ("command", "cwd", "env", "gpus", "memory", "array", "after", "time_limit", "name", "estimate", "venv")


@FUZZ
@given(job=st.dictionaries(st.sampled_from(_NAMES), _VALUES, max_size=4), good=st.booleans())
def test_any_job_is_taken_or_refused_in_one_message(api, job, good):
    whole = {"command": ["true"], "cwd": "/", "hold": True, **job} if good else job
    answer = requests.post(
        api.url + "/v1/jobs",
        headers=api.headers | {"Content-Type": "application/json"},
        data=json.dumps({"job": whole}),
        timeout=60,
    )
    if answer.status_code != 201:
        problem(answer, answer.status_code)
        assert answer.status_code in (400, 404, 422)


def test_headers_without_end_are_cut(api):
    parts = urlsplit(api.url)
    with socket.create_connection((parts.hostname, parts.port), timeout=60) as connection:
        connection.sendall(b"GET /v1/ping HTTP/1.1\r\nX-Long: ")
        answer = b""
        try:
            for _ in range(64):
                connection.sendall(b"y" * (1 << 16))
            answer = connection.recv(1 << 16)
        except OSError:
            return  # the daemon did not read on
    assert answer.startswith(b"HTTP/1.1 400")


def test_tokens_are_scoped_listed_and_revoked_one_by_one(api):
    made = {scope: api.client.token_create(scope, scope) for scope in ("read", "submit", "operate")}
    clients = {scope: ullage.manager.Client(url=api.url, token=each["token"]) for scope, each in made.items()}
    held = api.client.submit(["true"], hold=True, cwd="/tmp")[0]
    allowed = {
        scope: [name for name, do in _doing(clients[scope], held).items() if not _refused(do)] for scope in clients
    }
    assert allowed == {
        "read": ["queue", "logs", "tokens"],
        "submit": ["queue", "logs", "tokens", "submit", "cancel"],
        "operate": ["queue", "logs", "tokens", "submit", "cancel", "drain", "make"],
    }
    listed = json.dumps(api.client.tokens())
    assert all(each["token"] not in listed and f'"id": {each["id"]},' in listed for each in made.values())
    kept = b"".join(file.read_bytes() for file in (api.home.folder / "manager").glob("state.db*"))
    assert not any(each["token"].encode() in kept for each in made.values())
    api.client.token_revoke(made["submit"]["id"])
    with pytest.raises(NotAllowed, match="Authorization"):
        clients["submit"].queue()
    assert clients["read"].ping()["you"] == clients["operate"].ping()["you"] == api.client.ping()["you"]
    assert not clients["read"].ping()["operator"] and clients["operate"].ping()["operator"]


def _doing(client, job):
    return {
        "queue": client.queue,
        "logs": lambda: client.logs(job),
        "tokens": client.tokens,
        "submit": lambda: client.submit(["true"], hold=True, cwd="/tmp"),
        "cancel": lambda: client.cancel(job),
        "drain": lambda: client.resume(0),
        "make": lambda: client.token_create("another"),
    }


def _refused(do):
    try:
        do()
    except NotAllowed as error:
        assert "this token allows to" in str(error)
        return True


def test_a_token_survives_a_restart_but_not_its_lifetime(home):
    api = Api(home)
    forever, short = api.client.token_create("a"), api.client.token_create("b", lasts=1.0)
    home.kill()
    home.start()
    api.refresh()
    assert ullage.manager.Client(url=api.url, token=forever["token"]).queue() == []
    client = ullage.manager.Client(url=api.url, token=short["token"])

    def over():
        try:
            client.queue()
        except NotAllowed:
            return True

    home.until(over, "the token to expire")


def test_tokens_on_the_command_line(api):
    home = api.home
    made = json.loads(home.cli("admin", "token", "create", "--name", "my\x1b[31m laptop", "--scope", "read", "--json"))
    assert home.cli("admin", "token", "create", "--expires", "30d").startswith("ullage_")
    listed = home.cli("admin", "token", "list", "--all")
    assert "my laptop" in listed and "\x1b" not in listed and made["token"] not in listed
    assert home.cli("admin", "token", "revoke", str(made["id"])) == f"token {made['id']} of {made['user']} is revoked\n"
    assert "revoked 20" in home.cli("admin", "token", "list")
    assert "scope: input should be 'read', 'submit' or 'operate', got 'all'" in home.cli(
        "admin", "token", "create", "--scope", "all", code=2
    )
    assert "no token 999" in home.cli("admin", "token", "revoke", "999", code=2)
    assert "no user 'nobody at all'" in home.cli("admin", "token", "create", "--user", "nobody at all", code=2)


def crowd(api, number, sent):
    """So many connections that have sent that and nothing more."""
    parts = urlsplit(api.url)
    made = []
    for _ in range(number):
        made.append(socket.create_connection((parts.hostname, parts.port), timeout=60))
        made[-1].sendall(sent)
    return made


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"GET /v1/ping HT",
        b"POST /v1/jobs HTTP/1.1\r\nHost: a\r\nContent-Length: 99\r\n\r\n{",
        b"GET /v1/ping HTTP/1.1\r\nHost: a\r\n\r\nGET /v1",
    ],
    ids=["nothing", "half a line", "half a body", "half of a second request"],
)
def test_half_open_connections_lock_no_user_out(api, sent):
    made = crowd(api, 300, sent)
    try:
        for _ in range(3):
            assert api.get("/v1/ping").status_code == 200
        made += crowd(api, 300, sent)
        assert api.get("/v1/ping").status_code == 200
    finally:
        for one in made:
            one.close()


@pytest.mark.slow
def test_a_connection_that_sends_no_request_is_closed(api):
    """Also one that goes on sending, a letter at a time."""
    quiet, slow = crowd(api, 2, b"GET /")
    with quiet, slow:
        ended = False
        for _ in range(600):
            try:
                slow.sendall(b"x")
            except OSError:
                ended = True
                break
            time.sleep(0.1)
        assert ended
        with contextlib.suppress(ConnectionResetError):
            assert quiet.recv(1) == b""


def test_concurrent_requests_are_limited_but_not_of_operators():
    users = {name: Caller(number, number, name, name == "root") for number, name in enumerate(("root", "ann", "bob"))}

    async def all_of_them():
        going, answers = asyncio.Event(), []

        async def app(scope, receive, send):
            await going.wait()
            await send({"type": "http.response.start", "status": 200, "headers": []})

        async def send(message):
            answers.append(message.get("status"))

        gate = Gate(app, users.get, each=3)
        scope = {"type": "http", "path": "/v1/ping", "method": "GET", "headers": []}
        tasks = [
            asyncio.create_task(gate({**scope, "headers": [(b"authorization", f"Bearer {name}".encode())]}, None, send))
            for name in ("ann",) * 5 + ("bob",) + ("root",) * 5
        ]
        await asyncio.sleep(0)
        refused = [status for status in answers if status]
        going.set()
        await asyncio.gather(*tasks)
        return refused, answers.count(200)

    assert asyncio.run(all_of_them()) == ([429] * 2, 3 + 1 + 5)


def test_a_job_keeps_the_variables_that_every_program_expects(api):
    [job] = api.client.submit(["sh", "-c", 'echo "$HOME $USER $MINE"'], memory="1GiB", cwd="/tmp", env={"MINE": "yes"})
    api.client.wait(job, timeout=60)
    user = pwd.getpwuid(os.getuid())
    assert api.client.logs(job) == f"{user.pw_dir} {user.pw_name} yes\n"


def test_it_listens_on_loopback_and_says_what_it_cannot(api):
    assert urlsplit(api.url).hostname == "127.0.0.1"
    places = {"80": ("127.0.0.1", 80), "localhost:1": ("localhost", 1), "[::1]:2": ("::1", 2)}
    assert {text: parse_listen(text) for text in places} == places
    for text in ("", "x", "1:2:3", "99999", "a b:1"):
        with pytest.raises(InvalidValue, match="--api must be a port such as 8600"):
            parse_listen(text)
    other = api.home.folder.parent / "other"
    command = [sys.executable, "-m", "ullage", "serve", "--virtual", "T4", "--api", str(urlsplit(api.url).port)]
    environment = api.home.environment() | {"ULLAGE_HOME": str(other)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "cannot listen on 127.0.0.1" in done.stderr.replace("\n", " ")


def test_a_daemon_that_ends_lets_its_listeners_go(home):
    api = Api(home)
    with api.get("/v1/events/stream", stream=True) as answer:
        assert answer.status_code == 200
        home.stop()
    assert home.process.returncode == 0
    with pytest.raises(NoDaemon, match="no daemon answers at http"):
        api.client.queue()
    home.start()
    before = api.token
    api.refresh()
    assert api.token == before and api.client.queue() == []


def test_the_command_line_does_not_load_the_api():
    code = "import sys, ullage.cli.main; sys.exit(bool({'fastapi', 'uvicorn', 'torch'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_a_client_needs_a_url_and_a_token():
    with pytest.raises(InvalidValue, match="url and token must both be given"):
        ullage.manager.Client(url="http://127.0.0.1:1")
    with pytest.raises(InvalidValue, match="the API must be a URL such as"):
        ullage.manager.Client(url="ftp://x", token="t")
    with pytest.raises(NoDaemon):
        ullage.manager.Client(url="http://127.0.0.1:1", token="t").queue()
