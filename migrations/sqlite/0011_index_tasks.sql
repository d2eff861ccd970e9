-- Lists of tasks: by queue and status, and by the worker that completed them. Ids are in the order of time.
CREATE INDEX tasks_queue ON tasks (queue, status, id);
CREATE INDEX results_worker ON results (worker, task_id);
