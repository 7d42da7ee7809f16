-- A database of version 1 (Ullage 0.1.0), as its daemon wrote it: six jobs that ended or are held, and a drained GPU.
BEGIN TRANSACTION;
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
INSERT INTO "attempts" VALUES(1,1,'98fa2fc3fbb6303136e4108eef3996d3','over','["GPU-744badb4-8cc5-4f3b-8f15-d05441d51cc3"]',3221225472,0,1.79478175645012688637e+09,1.79478175668712592125e+09,1.79478175671580553055e+09,3.04111089999423711561e-02,'finished','exit code 0',0,NULL,NULL,9863168);
INSERT INTO "attempts" VALUES(2,1,'8a9379c7f85af47850e5ccfde4ac89d0','over','["GPU-744badb4-8cc5-4f3b-8f15-d05441d51cc3"]',2147483648,0,1.79478176120230817795e+09,1.7947817614983651638e+09,1.7947817615365884304e+09,3.95247019996531889774e-02,'failed by itself','exit code 1',1,NULL,NULL,9850880);
INSERT INTO "attempts" VALUES(3,1,'205283c7bcff97a054adc6692fe2ee33','over','["GPU-744badb4-8cc5-4f3b-8f15-d05441d51cc3"]',42294312960,1,1.79478176566586613655e+09,1.79478176593739438057e+09,1.79478176597486829758e+09,4.18038309999246848747e-02,'finished','exit code 0',0,NULL,NULL,9838592);
CREATE TABLE dependencies (
    job INTEGER NOT NULL REFERENCES jobs (id),
    needs INTEGER NOT NULL REFERENCES jobs (id),
    kind TEXT NOT NULL,                   -- ok, any
    PRIMARY KEY (job, needs)
) WITHOUT ROWID;
INSERT INTO "dependencies" VALUES(6,1,'ok');
CREATE TABLE estimates (
    key TEXT PRIMARY KEY,
    upper INTEGER, note TEXT NOT NULL, seconds REAL NOT NULL, made REAL NOT NULL
) WITHOUT ROWID;
CREATE TABLE events (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    time REAL NOT NULL, kind TEXT NOT NULL, job INTEGER, attempt INTEGER, text TEXT NOT NULL
);
INSERT INTO "events" VALUES(1,1.79478175643439722061e+09,'submitted',1,NULL,'by root');
INSERT INTO "events" VALUES(2,1.79478175645049262047e+09,'starting',1,NULL,'on GPU-744badb4-8cc5-4f3b-8f15-d05441d51cc3: 3.00 GiB');
INSERT INTO "events" VALUES(3,1.79478175671753239632e+09,'running',1,NULL,'');
INSERT INTO "events" VALUES(4,1.79478175686564254761e+09,'done',1,NULL,'exit code 0');
INSERT INTO "events" VALUES(5,1.79478176120085668564e+09,'submitted',2,NULL,'by root');
INSERT INTO "events" VALUES(6,1.7947817612025911808e+09,'starting',2,NULL,'on GPU-744badb4-8cc5-4f3b-8f15-d05441d51cc3: 2.00 GiB');
INSERT INTO "events" VALUES(7,1.79478176151336073875e+09,'running',2,NULL,'');
INSERT INTO "events" VALUES(8,1.79478176167640566826e+09,'failed',2,NULL,'failed by itself: exit code 1');
INSERT INTO "events" VALUES(9,1.79478176564406704903e+09,'submitted',3,NULL,'by root');
INSERT INTO "events" VALUES(10,1.79478176566611385345e+09,'starting',3,NULL,'on GPU-744badb4-8cc5-4f3b-8f15-d05441d51cc3: 39.4 GiB, alone');
INSERT INTO "events" VALUES(11,1.79478176595744919777e+09,'running',3,NULL,'');
INSERT INTO "events" VALUES(12,1.79478176604144906998e+09,'done',3,NULL,'exit code 0');
INSERT INTO "events" VALUES(13,1.79478177051878595352e+09,'submitted',4,NULL,'by root');
INSERT INTO "events" VALUES(14,1.79478177051894831657e+09,'submitted',5,NULL,'by root');
INSERT INTO "events" VALUES(15,1.79478177515421295166e+09,'submitted',6,NULL,'by root');
INSERT INTO "events" VALUES(16,1.79478177952664136887e+09,'drained',NULL,NULL,'GPU-c7dd447c-b46c-4942-8d68-4762a621f148 dust');
CREATE TABLE gpus (id TEXT PRIMARY KEY, drained INTEGER NOT NULL, reason TEXT NOT NULL) WITHOUT ROWID;
INSERT INTO "gpus" VALUES('GPU-c7dd447c-b46c-4942-8d68-4762a621f148',1,'dust');
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
INSERT INTO "jobs" VALUES(1,'fa0056921da192ef92f9aa49498ea441',0,'root',0,0,'finished','done',1.79478175643412351608e+09,1.79478175668712592125e+09,1.79478175671580553055e+09,0,NULL,NULL,'{"asked": {"command": ["true"], "cwd": "/tmp", "name": "finished", "env": {}, "venv": null, "conda": null, "gpus": 1, "memory": 3221225472, "host_memory": null, "model": null, "batch_size": null, "estimate_options": {}, "exclusive": false, "priority": 0, "time_limit": null, "resumable": false, "checkpoint_signal": null, "checkpoint_lead": null, "estimator": null, "mps_threads": null, "mps_memory": null, "umask": 18}, "gpus": 1, "time_limit": null, "limits": {"RLIMIT_CPU": [-1, -1], "RLIMIT_FSIZE": [-1, -1], "RLIMIT_STACK": [8388608, -1], "RLIMIT_CORE": [0, -1], "RLIMIT_NPROC": [96373, 96373], "RLIMIT_NOFILE": [20000, 20000], "RLIMIT_MEMLOCK": [8388608, 8388608], "RLIMIT_AS": [-1, -1]}}',NULL,'as its submitter says',3221225472,0,0,0,0,NULL,'finished','exit code 0',0,3.04111089999423711561e-02);
INSERT INTO "jobs" VALUES(2,'c40e1708678358c10ecf8da1f3b3a08d',0,'root',0,0,'failing','failed',1.79478176118846273422e+09,1.7947817614983651638e+09,1.7947817615365884304e+09,0,NULL,NULL,'{"asked": {"command": ["false"], "cwd": "/tmp", "name": "failing", "env": {}, "venv": null, "conda": null, "gpus": 1, "memory": 2147483648, "host_memory": null, "model": null, "batch_size": null, "estimate_options": {}, "exclusive": false, "priority": 0, "time_limit": null, "resumable": false, "checkpoint_signal": null, "checkpoint_lead": null, "estimator": null, "mps_threads": null, "mps_memory": null, "umask": 18}, "gpus": 1, "time_limit": null, "limits": {"RLIMIT_CPU": [-1, -1], "RLIMIT_FSIZE": [-1, -1], "RLIMIT_STACK": [8388608, -1], "RLIMIT_CORE": [0, -1], "RLIMIT_NPROC": [96373, 96373], "RLIMIT_NOFILE": [20000, 20000], "RLIMIT_MEMLOCK": [8388608, 8388608], "RLIMIT_AS": [-1, -1]}}',NULL,'as its submitter says',2147483648,0,0,0,0,NULL,'failed by itself','exit code 1',1,3.95247019996531889774e-02);
INSERT INTO "jobs" VALUES(3,'1a3ab3eef9cfc42bcb037c250114aa0c',0,'root',0,0,'unknown','done',1.79478176564390158653e+09,1.79478176593739438057e+09,1.79478176597486829758e+09,0,NULL,NULL,'{"asked": {"command": ["true"], "cwd": "/tmp", "name": "unknown", "env": {}, "venv": null, "conda": null, "gpus": 1, "memory": null, "host_memory": null, "model": null, "batch_size": null, "estimate_options": {}, "exclusive": false, "priority": 0, "time_limit": null, "resumable": false, "checkpoint_signal": null, "checkpoint_lead": null, "estimator": null, "mps_threads": null, "mps_memory": null, "umask": 18}, "gpus": 1, "time_limit": null, "limits": {"RLIMIT_CPU": [-1, -1], "RLIMIT_FSIZE": [-1, -1], "RLIMIT_STACK": [8388608, -1], "RLIMIT_CORE": [0, -1], "RLIMIT_NPROC": [96373, 96373], "RLIMIT_NOFILE": [20000, 20000], "RLIMIT_MEMLOCK": [8388608, 8388608], "RLIMIT_AS": [-1, -1]}}',NULL,'not estimated: this site wants none',NULL,0,0,0,0,NULL,'finished','exit code 0',0,4.18038309999246848747e-02);
INSERT INTO "jobs" VALUES(4,'a60086290a1b7b75855b75edabdc3cae',0,'root',0,0,'held','held',1.79478177051847863197e+09,NULL,NULL,0,4,1,'{"asked": {"command": ["echo", "1"], "cwd": "/tmp", "name": "held", "env": {}, "venv": null, "conda": null, "gpus": 1, "memory": 5368709120, "host_memory": null, "model": null, "batch_size": null, "estimate_options": {}, "exclusive": false, "priority": 0, "time_limit": null, "resumable": false, "checkpoint_signal": null, "checkpoint_lead": null, "estimator": null, "mps_threads": null, "mps_memory": null, "umask": 18}, "gpus": 1, "time_limit": null, "limits": {"RLIMIT_CPU": [-1, -1], "RLIMIT_FSIZE": [-1, -1], "RLIMIT_STACK": [8388608, -1], "RLIMIT_CORE": [0, -1], "RLIMIT_NPROC": [96373, 96373], "RLIMIT_NOFILE": [20000, 20000], "RLIMIT_MEMLOCK": [8388608, 8388608], "RLIMIT_AS": [-1, -1]}}',NULL,'as its submitter says',5368709120,0,0,0,0,NULL,NULL,NULL,NULL,0.0);
INSERT INTO "jobs" VALUES(5,'a60086290a1b7b75855b75edabdc3cae',1,'root',0,0,'held','held',1.79478177051849508286e+09,NULL,NULL,0,4,2,'{"asked": {"command": ["echo", "2"], "cwd": "/tmp", "name": "held", "env": {}, "venv": null, "conda": null, "gpus": 1, "memory": 5368709120, "host_memory": null, "model": null, "batch_size": null, "estimate_options": {}, "exclusive": false, "priority": 0, "time_limit": null, "resumable": false, "checkpoint_signal": null, "checkpoint_lead": null, "estimator": null, "mps_threads": null, "mps_memory": null, "umask": 18}, "gpus": 1, "time_limit": null, "limits": {"RLIMIT_CPU": [-1, -1], "RLIMIT_FSIZE": [-1, -1], "RLIMIT_STACK": [8388608, -1], "RLIMIT_CORE": [0, -1], "RLIMIT_NPROC": [96373, 96373], "RLIMIT_NOFILE": [20000, 20000], "RLIMIT_MEMLOCK": [8388608, 8388608], "RLIMIT_AS": [-1, -1]}}',NULL,'as its submitter says',5368709120,0,0,0,0,NULL,NULL,NULL,NULL,0.0);
INSERT INTO "jobs" VALUES(6,'554e708780675bd73a5b35be638f9724',0,'root',0,0,'filed','held',1.79478177515399837494e+09,NULL,NULL,0,NULL,NULL,'{"asked": {"command": ["echo", "hello"], "cwd": "/tmp", "name": "filed", "env": {}, "venv": null, "conda": null, "gpus": 1, "memory": 1073741824, "host_memory": null, "model": "torchvision:resnet18", "batch_size": 8, "estimate_options": {"optimizer": "sgd"}, "exclusive": false, "priority": 0, "time_limit": null, "resumable": false, "checkpoint_signal": null, "checkpoint_lead": null, "estimator": null, "mps_threads": null, "mps_memory": null, "umask": 18}, "gpus": 1, "time_limit": null, "limits": {"RLIMIT_CPU": [-1, -1], "RLIMIT_FSIZE": [-1, -1], "RLIMIT_STACK": [8388608, -1], "RLIMIT_CORE": [0, -1], "RLIMIT_NPROC": [96373, 96373], "RLIMIT_NOFILE": [20000, 20000], "RLIMIT_MEMLOCK": [8388608, 8388608], "RLIMIT_AS": [-1, -1]}}',NULL,'as its submitter says',1073741824,0,0,0,0,NULL,NULL,NULL,NULL,0.0);
CREATE INDEX jobs_by_state ON jobs (state);
CREATE INDEX attempts_by_end ON attempts (ended);
CREATE INDEX live_attempts ON attempts (state) WHERE state != 'over';
DELETE FROM "sqlite_sequence";
INSERT INTO "sqlite_sequence" VALUES('jobs',6);
INSERT INTO "sqlite_sequence" VALUES('events',16);
COMMIT;
