-- Lists of tasks: by queue and status, and by the worker that completed them. Ids are in the order of time.
ALTER TABLE tasks ADD KEY tasks_queue (queue, status, id);
ALTER TABLE results ADD KEY results_worker (worker, task_id);
