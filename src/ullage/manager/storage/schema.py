"""The tables of the daemon's database."""

VERSION = 24  # raised when a table changes; databases of versions without a migration are refused

# Migrations to the next version, by the older version.
MIGRATIONS: dict[int, str] = {}

TABLES = """
CREATE TABLE specs (
    id INTEGER PRIMARY KEY,
    content TEXT NOT NULL                 -- what was asked for, as JSON; the jobs of an array share it
);
CREATE TABLE jobs (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    submission TEXT NOT NULL,             -- the key that the submitter gave: the same key twice is one submission
    part INTEGER NOT NULL,                -- which job of that submission (an array has several)
    user TEXT NOT NULL, uid INTEGER NOT NULL, gid INTEGER NOT NULL,
    name TEXT NOT NULL,
    state TEXT NOT NULL,
    submitted REAL NOT NULL, started REAL, ended REAL,
    priority INTEGER NOT NULL,
    array_id INTEGER, array_index INTEGER,
    spec_id INTEGER REFERENCES specs (id),
    estimate_key TEXT,                    -- by which the estimate that is to come will be kept; NULL if none is
    estimate_note TEXT,                   -- who said how much it needs, or why nobody could
    breakdown TEXT,                       -- of the estimate: bytes by part, as JSON; unknown is NULL
    work TEXT,
    promise INTEGER,                      -- bytes on each GPU that a placement has to promise; unknown is NULL
    promises TEXT NOT NULL DEFAULT '[]',  -- the same by rank where ranks differ: a JSON list
    exclusive INTEGER NOT NULL,           -- asked for, or grown to it by recovery
    recovery INTEGER NOT NULL DEFAULT 0,  -- waits in the recovery queue
    memory_failures INTEGER NOT NULL DEFAULT 0,
    other_failures INTEGER NOT NULL DEFAULT 0,
    own_failures INTEGER NOT NULL DEFAULT 0,
    crashes INTEGER NOT NULL DEFAULT 0,   -- how often in a row the daemon ended while it dealt with the job
    stop_reason TEXT,                     -- why it is being stopped
    cause TEXT, detail TEXT, exit_code INTEGER,
    ran REAL NOT NULL DEFAULT 0,          -- seconds over all attempts
    UNIQUE (submission, part)
);
CREATE INDEX jobs_by_state ON jobs (state);
CREATE INDEX jobs_by_spec ON jobs (spec_id);
CREATE INDEX jobs_by_array ON jobs (array_id) WHERE array_id IS NOT NULL;
CREATE INDEX jobs_by_name ON jobs (name);
CREATE INDEX jobs_by_end ON jobs (ended);
CREATE TABLE attempts (
    job INTEGER NOT NULL REFERENCES jobs (id),
    number INTEGER NOT NULL,
    token TEXT NOT NULL UNIQUE,
    state TEXT NOT NULL,                  -- starting, running, over
    slots TEXT NOT NULL,                  -- JSON list of UUIDs
    promise INTEGER,
    promises TEXT NOT NULL DEFAULT '[]',  -- on each of the slots, where ranks differ
    exclusive INTEGER NOT NULL,
    cores INTEGER NOT NULL DEFAULT 0, host_promise INTEGER NOT NULL DEFAULT 0,
    placed REAL NOT NULL, started REAL, ended REAL, elapsed REAL,
    cause TEXT, detail TEXT, exit_code INTEGER, signal INTEGER,
    used INTEGER, host_memory INTEGER,
    gpu_part REAL,                        -- GPUs, each by the part of its memory that was promised
    waited REAL,                          -- seconds that the job had waited for this attempt
    energy REAL,                          -- joules
    PRIMARY KEY (job, number)
) WITHOUT ROWID;
CREATE INDEX attempts_by_end ON attempts (ended);
CREATE INDEX live_attempts ON attempts (state) WHERE state != 'over';
CREATE TABLE curves (                     -- the memory of attempts over time
    job INTEGER NOT NULL REFERENCES jobs (id),
    number INTEGER NOT NULL,              -- of the attempt
    step REAL NOT NULL,                   -- seconds between two figures
    "values" TEXT NOT NULL,               -- bytes, a JSON list; null where nobody looked
    PRIMARY KEY (job, number)
) WITHOUT ROWID;
CREATE TABLE dependencies (
    job INTEGER NOT NULL REFERENCES jobs (id),
    needs INTEGER NOT NULL REFERENCES jobs (id),
    whole INTEGER NOT NULL,               -- all jobs of the array with that number, not that one alone
    kind TEXT NOT NULL,                   -- ok, any
    PRIMARY KEY (job, needs, whole)
) WITHOUT ROWID;
CREATE TABLE arrays (
    id INTEGER PRIMARY KEY REFERENCES jobs (id),
    throttle INTEGER NOT NULL             -- how many of its jobs run at once
);
CREATE TABLE estimates (
    id INTEGER PRIMARY KEY,
    key TEXT NOT NULL,                    -- who asked, what is run where, GPUs and versions
    upper INTEGER, seconds REAL NOT NULL, made REAL NOT NULL,
    answer BLOB NOT NULL                  -- with the files and variables that it follows from: JSON, zlib
);
CREATE INDEX estimates_by_key ON estimates (key);
CREATE INDEX estimates_by_age ON estimates (made);
CREATE TABLE questions (                  -- what users asked without a job, and what was answered
    id TEXT PRIMARY KEY,                  -- nobody can guess it
    uid INTEGER NOT NULL, gid INTEGER NOT NULL, user TEXT NOT NULL,
    asked REAL NOT NULL,
    question BLOB NOT NULL,               -- JSON, zlib
    answered REAL,
    answer BLOB                           -- JSON, zlib
) WITHOUT ROWID;
CREATE INDEX questions_by_user ON questions (uid, asked);
CREATE INDEX open_questions ON questions (asked) WHERE answered IS NULL;
CREATE TABLE works (                      -- what jobs do on GPUs
    id TEXT PRIMARY KEY,                  -- of what is run by whom, and what was predicted of it
    predicted TEXT NOT NULL,              -- by the name of a GPU, as JSON
    changed REAL NOT NULL
) WITHOUT ROWID;
CREATE INDEX works_by_age ON works (changed);
CREATE TABLE drains (                     -- GPUs that get no new jobs
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    gpu TEXT NOT NULL,                    -- UUID
    "begin" REAL NOT NULL,
    until REAL,                           -- NULL: until the GPU is resumed
    users TEXT NOT NULL, groups TEXT NOT NULL,  -- whose jobs may use it meanwhile: JSON lists of names
    reason TEXT NOT NULL
);
CREATE TABLE events (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    time REAL NOT NULL, kind TEXT NOT NULL, job INTEGER, attempt INTEGER, text TEXT NOT NULL
);
CREATE TABLE notifications (              -- ends of jobs that are still to be told; written with the end itself
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    job INTEGER NOT NULL REFERENCES jobs (id),
    kind TEXT NOT NULL,                   -- hook, command
    target TEXT NOT NULL,                 -- the command and its folder, as JSON
    facts TEXT NOT NULL                   -- what is told, as JSON
);
CREATE TABLE accounts (                   -- what users used of late
    user TEXT PRIMARY KEY,
    used REAL NOT NULL,                   -- GPU-seconds, as they counted at that time
    at REAL NOT NULL
) WITHOUT ROWID;
CREATE TABLE tokens (                     -- of the API, each for one user
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    hash TEXT NOT NULL UNIQUE,            -- of the token, which itself is kept nowhere
    uid INTEGER NOT NULL, user TEXT NOT NULL,
    scope TEXT NOT NULL,                  -- read, submit, operate
    name TEXT NOT NULL,
    made REAL NOT NULL, expires REAL, revoked REAL
);
CREATE TABLE site (told TEXT NOT NULL);   -- the GPUs, policy and rules of the daemon, as JSON; one row
CREATE TABLE runs (                       -- what the last runs of a command took
    id INTEGER PRIMARY KEY,
    key TEXT NOT NULL,                    -- of the user, the command, and where and on how many GPUs it ran
    used INTEGER NOT NULL,                -- the most bytes that it held on one GPU
    elapsed REAL NOT NULL, ended REAL NOT NULL
);
CREATE INDEX runs_by_key ON runs (key);
CREATE INDEX runs_by_age ON runs (ended);
"""

# The variables of a job may be secret, so only their names are kept after its end.
DROP_ENVIRONMENT = """
UPDATE specs SET content = json_set(
    json_remove(content, '$.asked.env'), '$.variables',
    (SELECT json_group_array(key) FROM json_each(content, '$.asked.env'))
) WHERE CASE WHEN json_valid(content) THEN json_type(content, '$.asked.env') END = 'object' AND id = ?
"""
