-- The time by Redis's clock (ms). The key only chooses a node of the cluster, always the same.
--
-- KEYS[1] -> <p>:store-id
return now
