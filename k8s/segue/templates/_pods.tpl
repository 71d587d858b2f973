{{/* Parts that pods of several components share. */}}

{{- define "segue.podSecurity" -}}
runAsNonRoot: true
runAsUser: 1000
runAsGroup: 1000
fsGroup: 1000
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "segue.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{/* Where to run: `dict "place" .Values.front`. Nothing when nothing is asked for. */}}
{{- define "segue.placement" -}}
{{- with .place.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .place.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .place.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "segue.imagePullSecrets" -}}
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* The pod's own name, id and address, for the configurations below: the kubelet writes them in for $(POD_...). */}}
{{- define "segue.podFacts" -}}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: POD_UID
  valueFrom: {fieldRef: {fieldPath: metadata.uid}}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
{{- end -}}

{{/* A process that reads its configuration as one line of JSON: `dict "module" "conductor.app"`. exec makes it the
container's first process, so that SIGTERM reaches it. */}}
{{- define "segue.command" -}}
- /bin/sh
- -c
- |
  exec python -m {{ .module }} <<END
  $SEGUE_CONFIG
  END
{{- end -}}

{{/* DirectoryConfig of segue/config.py: no URL without Redis. */}}
{{- define "segue.directoryConfig" -}}
{{- $own := printf "redis://%s-redis:%d" (include "segue.fullname" .) (int .Values.redis.port) -}}
{{- dict
  "redis_url" (ternary $own .Values.redis.url .Values.redis.enabled)
  "cluster" (printf "%s/%s" .Release.Namespace (include "segue.fullname" .))
  | toJson -}}
{{- end -}}

{{/* FrontConfig of segue/config.py. */}}
{{- define "segue.frontConfig" -}}
{{- dict
  "host" "0.0.0.0"
  "advertise_host" "$(POD_IP)"
  "grpc_port" (int .Values.front.grpcPort)
  "http_port" (int .Values.front.httpPort)
  "model_names" (list .Values.model.name)
  "queue_max" (int .Values.front.queueMax)
  "strict_fields" .Values.front.strictFields
  "log_level" .Values.front.logLevel
  "directory" (include "segue.directoryConfig" . | fromJson)
  | toJson -}}
{{- end -}}

{{/* WorkerConfig of segue/config.py; with Redis, instances find the fronts in it: `dict "root" $ "role" "prefill" "pool" .Values.prefill`. */}}
{{- define "segue.workerConfig" -}}
{{- $root := .root -}}
{{- dict
  "uuid" "$(POD_UID)"
  "name" "$(POD_NAME)"
  "role" .role
  "bind_host" "$(POD_IP)"
  "conductors" (ternary (list) (list (printf "%s-workers:%d" (include "segue.fullname" $root) (int $root.Values.front.grpcPort))) (or $root.Values.redis.enabled (ne $root.Values.redis.url "")))
  "directory" (include "segue.directoryConfig" $root | fromJson)
  "model" (dict
    "path" $root.Values.model.path
    "name" $root.Values.model.name
    "dtype" $root.Values.model.dtype
    "max_model_len" (int $root.Values.model.maxModelLen))
  "engine" (dict
    "device" (ternary "cuda" "cpu" (gt (int .pool.gpus) 0))
    "threads" (int .pool.threads)
    "block_size" (int .pool.blockSize)
    "kv_memory_bytes" (mul .pool.kvMemoryMi 1048576))
  "scheduler" (dict
    "max_num_seqs" (int $root.Values.scheduler.maxNumSeqs)
    "max_num_batched_tokens" (int $root.Values.scheduler.maxNumBatchedTokens)
    "prefix_caching" $root.Values.scheduler.prefixCaching
    "kv_connector" $root.Values.scheduler.kvConnector)
  | toJson -}}
{{- end -}}
