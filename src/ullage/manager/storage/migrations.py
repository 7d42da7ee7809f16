"""The tables of the manager's database, and how an older database becomes one of this version."""

from __future__ import annotations

# The tables of version 1. Later versions are made from them, step by step.
VERSION_1 = """
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
    spec TEXT NOT NULL,                   -- what was asked for, as JSON
    estimate_key TEXT,
    estimate_note TEXT,                   -- who said how much it needs, or why nobody could
    need INTEGER,                         -- bytes on each GPU that a placement has to promise; unknown is NULL
    exclusive INTEGER NOT NULL,           -- asked for, or grown to it by recovery
    recovery INTEGER NOT NULL DEFAULT 0,  -- waits in the recovery queue
    memory_failures INTEGER NOT NULL DEFAULT 0,
    other_failures INTEGER NOT NULL DEFAULT 0,
    stop_reason TEXT,                     -- why it is being stopped
    cause TEXT, detail TEXT, exit_code INTEGER,
    ran REAL NOT NULL DEFAULT 0,          -- seconds over all attempts
    UNIQUE (submission, part)
);
CREATE INDEX jobs_by_state ON jobs (state);
CREATE TABLE attempts (
    job INTEGER NOT NULL REFERENCES jobs (id),
    number INTEGER NOT NULL,
    token TEXT NOT NULL UNIQUE,
    state TEXT NOT NULL,                  -- starting, running, over
    slots TEXT NOT NULL,                  -- JSON list of UUIDs
    promised INTEGER, exclusive INTEGER NOT NULL,
    placed REAL NOT NULL, started REAL, ended REAL, elapsed REAL,
    cause TEXT, detail TEXT, exit_code INTEGER, signal INTEGER,
    gpu_memory INTEGER, host_memory INTEGER,
    PRIMARY KEY (job, number)
) WITHOUT ROWID;
CREATE INDEX attempts_by_end ON attempts (ended);
CREATE INDEX live_attempts ON attempts (state) WHERE state != 'over';
CREATE TABLE dependencies (
    job INTEGER NOT NULL REFERENCES jobs (id),
    needs INTEGER NOT NULL REFERENCES jobs (id),
    kind TEXT NOT NULL,                   -- ok, any
    PRIMARY KEY (job, needs)
) WITHOUT ROWID;
CREATE TABLE estimates (
    key TEXT PRIMARY KEY,
    upper INTEGER, note TEXT NOT NULL, seconds REAL NOT NULL, made REAL NOT NULL
) WITHOUT ROWID;
CREATE TABLE gpus (id TEXT PRIMARY KEY, drained INTEGER NOT NULL, reason TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE events (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    time REAL NOT NULL, kind TEXT NOT NULL, job INTEGER, attempt INTEGER, text TEXT NOT NULL
);
"""

# One word for one thing: what a job is promised, and what it used at most.
VERSION_2 = """
ALTER TABLE jobs RENAME COLUMN need TO promise;
ALTER TABLE attempts RENAME COLUMN promised TO promise;
ALTER TABLE attempts RENAME COLUMN gpu_memory TO used;
"""

# How often a job failed by itself: it may be tried again as often as its submitter said.
OWN_FAILURES = """
ALTER TABLE jobs ADD COLUMN own_failures INTEGER NOT NULL DEFAULT 0;
"""

# What an attempt was promised of the host, so that it counts again after a restart.
HOST_SHARES = """
ALTER TABLE attempts ADD COLUMN cores INTEGER NOT NULL DEFAULT 0;
ALTER TABLE attempts ADD COLUMN host_promise INTEGER NOT NULL DEFAULT 0;
"""

# What was asked for is kept once for all jobs of an array; arrays and names are looked for.
SHARED_SPECS = """
CREATE TABLE specs (
    id INTEGER PRIMARY KEY,
    content TEXT NOT NULL                 -- what was asked for, as JSON
);
INSERT INTO specs SELECT min(id), spec FROM jobs GROUP BY submission, spec;
ALTER TABLE jobs ADD COLUMN spec_id INTEGER REFERENCES specs (id);
UPDATE jobs SET spec_id = shared.first
    FROM (SELECT id, min(id) OVER (PARTITION BY submission, spec) AS first FROM jobs) AS shared
    WHERE shared.id = jobs.id;
ALTER TABLE jobs DROP COLUMN spec;
CREATE INDEX jobs_by_spec ON jobs (spec_id);
CREATE INDEX jobs_by_array ON jobs (array_id) WHERE array_id IS NOT NULL;
CREATE INDEX jobs_by_name ON jobs (name);
CREATE INDEX jobs_by_end ON jobs (ended);
"""

# How often in a row the daemon ended while it dealt with a job.
CRASHES = """
ALTER TABLE jobs ADD COLUMN crashes INTEGER NOT NULL DEFAULT 0;
"""

# What an attempt took, for reports: the GPUs by the part of their memory that it was promised, how long its job had
# waited for it in seconds, and joules.
ATTEMPT_FIGURES = """
ALTER TABLE attempts ADD COLUMN gpu_part REAL;
ALTER TABLE attempts ADD COLUMN waited REAL;
ALTER TABLE attempts ADD COLUMN energy REAL;
"""

# Tokens of the API, each for one user.
TOKENS = """
CREATE TABLE tokens (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    hash TEXT NOT NULL UNIQUE,            -- of the token, which itself is kept nowhere
    uid INTEGER NOT NULL, user TEXT NOT NULL,
    scope TEXT NOT NULL,                  -- read, submit, operate
    name TEXT NOT NULL,
    made REAL NOT NULL, expires REAL, revoked REAL
);
"""

# The variables of a job may be secret and are not kept longer than the job needs them; their names are.
DROP_ENVIRONMENT = """
UPDATE specs SET content = json_set(
    json_remove(content, '$.asked.env'), '$.variables',
    (SELECT json_group_array(key) FROM json_each(content, '$.asked.env'))
) WHERE CASE WHEN json_valid(content) THEN json_type(content, '$.asked.env') END = 'object' AND """
ENVIRONMENTS_OF_THE_PAST = f"""
{DROP_ENVIRONMENT} NOT EXISTS (SELECT 1 FROM jobs WHERE spec_id = specs.id AND ended IS NULL);
"""

# Estimates are kept with what they followed from; those of before did not have it, and cannot be trusted.
ESTIMATE_READS = """
DROP TABLE estimates;
CREATE TABLE estimates (
    id INTEGER PRIMARY KEY,
    key TEXT NOT NULL,                    -- who asked, what is run where, GPUs and versions
    upper INTEGER, note TEXT NOT NULL, own_failure INTEGER NOT NULL, seconds REAL NOT NULL, made REAL NOT NULL,
    reads BLOB NOT NULL                   -- the files and variables that the answer follows from: JSON, zlib
);
CREATE INDEX estimates_by_key ON estimates (key);
CREATE INDEX estimates_by_age ON estimates (made);
"""

# Ends of jobs that are still to be told; written with the end itself.
NOTIFICATIONS = """
CREATE TABLE notifications (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    job INTEGER NOT NULL REFERENCES jobs (id),
    kind TEXT NOT NULL,                   -- hook, command, webhook, mail
    target TEXT NOT NULL,                 -- where to, as JSON
    facts TEXT NOT NULL,                  -- what is told, as JSON
    made REAL NOT NULL,
    tries INTEGER NOT NULL DEFAULT 0,
    due REAL NOT NULL                     -- not before this time
);
"""

# Jobs wait for whole arrays too, and of an array only some run at once.
ARRAYS = """
CREATE TABLE arrays (
    id INTEGER PRIMARY KEY REFERENCES jobs (id),
    throttle INTEGER NOT NULL             -- how many of its jobs run at once
);
ALTER TABLE dependencies RENAME TO old_dependencies;
CREATE TABLE dependencies (
    job INTEGER NOT NULL REFERENCES jobs (id),
    needs INTEGER NOT NULL REFERENCES jobs (id),
    whole INTEGER NOT NULL,               -- all jobs of the array with that number, not that one alone
    kind TEXT NOT NULL,                   -- ok, any
    PRIMARY KEY (job, needs, whole)
) WITHOUT ROWID;
INSERT INTO dependencies SELECT job, needs, 0, kind FROM old_dependencies;
DROP TABLE old_dependencies;
"""

# GPUs that operators reserve for users and groups.
RESERVATIONS = """
CREATE TABLE reservations (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    name TEXT NOT NULL,
    gpus TEXT NOT NULL,                   -- JSON list of UUIDs
    users TEXT NOT NULL, groups TEXT NOT NULL,  -- JSON lists of names
    "begin" REAL NOT NULL, "end" REAL NOT NULL,
    maker TEXT NOT NULL                   -- who reserved them
);
"""

# What users used of late, kept up to date instead of summed up; it begins anew.
ACCOUNTS = """
CREATE TABLE accounts (
    user TEXT PRIMARY KEY,
    used REAL NOT NULL,                   -- GPU-seconds, as they counted at that time
    at REAL NOT NULL
) WITHOUT ROWID;
"""

# What jobs do on GPUs: as it was predicted, and as it was measured since.
WORKS = """
CREATE TABLE works (
    id TEXT PRIMARY KEY,                  -- of what is run by whom, and what was predicted of it
    predicted TEXT NOT NULL,              -- by the name of a GPU, as JSON
    measured TEXT NOT NULL,               -- by the name of a GPU, as JSON
    changed REAL NOT NULL
) WITHOUT ROWID;
CREATE INDEX works_by_age ON works (changed);
ALTER TABLE jobs ADD COLUMN work TEXT;
ALTER TABLE estimates ADD COLUMN utilization TEXT NOT NULL DEFAULT '{}';
"""

# What users asked without a job, and what was answered.
QUESTIONS = """
CREATE TABLE questions (
    id TEXT PRIMARY KEY,                  -- nobody can guess it
    uid INTEGER NOT NULL, gid INTEGER NOT NULL, user TEXT NOT NULL,
    asked REAL NOT NULL,
    question BLOB NOT NULL,               -- JSON, zlib
    answered REAL,
    answer BLOB                           -- JSON, zlib
) WITHOUT ROWID;
CREATE INDEX questions_by_user ON questions (uid, asked);
CREATE INDEX open_questions ON questions (asked) WHERE answered IS NULL;
"""

# What the daemon has and goes by: its GPUs, policy and rules. Who reads the database alone knows what its jobs ran on.
SITE = """
CREATE TABLE site (told TEXT NOT NULL);   -- JSON; one row
"""

# What an estimate is made of, kept with the job; and the memory of attempts over time.
BREAKDOWNS_AND_CURVES = """
ALTER TABLE jobs ADD COLUMN breakdown TEXT;               -- bytes by part, as JSON; unknown is NULL
ALTER TABLE estimates ADD COLUMN breakdown TEXT;
CREATE TABLE curves (
    job INTEGER NOT NULL REFERENCES jobs (id),
    number INTEGER NOT NULL,              -- of the attempt
    step REAL NOT NULL,                   -- seconds between two figures
    "values" TEXT NOT NULL,               -- bytes, a JSON list; null where nobody looked
    PRIMARY KEY (job, number)
) WITHOUT ROWID;
"""

# What GPUs are promised where the ranks of a job take different memory: bytes, a JSON list in the order of the ranks.
PROMISES_BY_RANK = """
ALTER TABLE jobs ADD COLUMN promises TEXT NOT NULL DEFAULT '[]';
ALTER TABLE attempts ADD COLUMN promises TEXT NOT NULL DEFAULT '[]';
ALTER TABLE estimates ADD COLUMN by_rank TEXT NOT NULL DEFAULT '[]';
"""

# Step n makes a database of version n out of one of version n - 1. A step that was released is never changed.
MIGRATIONS = (
    VERSION_1,
    VERSION_2,
    OWN_FAILURES,
    HOST_SHARES,
    SHARED_SPECS,
    CRASHES,
    ATTEMPT_FIGURES,
    TOKENS,
    ENVIRONMENTS_OF_THE_PAST,
    ESTIMATE_READS,
    NOTIFICATIONS,
    ARRAYS,
    RESERVATIONS,
    ACCOUNTS,
    WORKS,
    QUESTIONS,
    SITE,
    BREAKDOWNS_AND_CURVES,
    PROMISES_BY_RANK,
)
