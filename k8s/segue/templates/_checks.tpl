{{/* What a schema cannot say, because it is about two values at once. */}}

{{/* `dict "name" "prefill" "pool" .Values.prefill`: fails with the name of the value. */}}
{{- define "segue.checkPool" -}}
{{- $pool := .pool -}}
{{- if not (and (le (int $pool.minReplicas) (int $pool.replicas)) (le (int $pool.replicas) (int $pool.maxReplicas))) -}}
{{- fail (printf "%s.replicas: %d is not between %s.minReplicas %d and %s.maxReplicas %d" .name (int $pool.replicas) .name (int $pool.minReplicas) .name (int $pool.maxReplicas)) -}}
{{- end -}}
{{- if and (eq (int $pool.gpus) 0) (lt (int $pool.kvMemoryMi) 64) -}}
{{- fail (printf "%s.kvMemoryMi: a CPU instance needs at least 64, got %d" .name (int $pool.kvMemoryMi)) -}}
{{- end -}}
{{- end -}}

{{/* A decode instance on CPU keeps its pages in /dev/shm, unless they only come over TCP. */}}
{{- define "segue.checkSharedMemory" -}}
{{- $pool := .Values.decode -}}
{{- if and (ne .Values.scheduler.kvConnector "tcp") (eq (int $pool.gpus) 0) (lt (int $pool.shmSizeMi) (int (add $pool.kvMemoryMi 64))) -}}
{{- fail (printf "decode.shmSizeMi: %d is too small: with kvConnector %s the %d MiB of decode.kvMemoryMi live in it, and 64 MiB more" (int $pool.shmSizeMi) .Values.scheduler.kvConnector (int $pool.kvMemoryMi)) -}}
{{- end -}}
{{- end -}}

{{- define "segue.checkPools" -}}
{{- range $name := list "prefill" "decode" "aggregated" -}}
{{- include "segue.checkPool" (dict "name" $name "pool" (index $.Values $name)) -}}
{{- end -}}
{{- include "segue.checkSharedMemory" . -}}
{{- if and (gt (int .Values.front.replicas) 1) (not .Values.redis.enabled) (not .Values.redis.url) -}}
{{- fail (printf "front.replicas: %d fronts need Redis: set redis.enabled or redis.url" (int .Values.front.replicas)) -}}
{{- end -}}
{{- if and .Values.redis.enabled .Values.redis.url -}}
{{- fail "redis.url: give either redis.enabled or redis.url" -}}
{{- end -}}
{{- $prefill := gt (int .Values.prefill.maxReplicas) 0 -}}
{{- $decode := gt (int .Values.decode.maxReplicas) 0 -}}
{{- if ne $prefill $decode -}}
{{- fail "prefill.maxReplicas and decode.maxReplicas: either both pools have instances or neither; aggregated instances do both" -}}
{{- end -}}
{{- if not (or $prefill (gt (int .Values.aggregated.maxReplicas) 0)) -}}
{{- fail "aggregated.maxReplicas: no pool has instances" -}}
{{- end -}}
{{- end -}}
