{{/* One instance and the Ray node it lives on. */}}

{{/* KubeRay expects Ray in the first container and writes its command: `dict "root" $ "resources" ...`. Its session
goes to /tmp. */}}
{{- define "segue.rayContainer" -}}
image: {{ include "segue.image" .root | quote }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  capabilities:
    drop: [ALL]
env:
  - name: HOME
    value: /tmp
resources:
  {{- toYaml .resources | nindent 2 }}
volumeMounts:
  - name: tmp
    mountPath: /tmp
{{- end -}}

{{/* `dict "root" $ "role" "prefill" "pool" .Values.prefill`. */}}
{{- define "segue.instancePod" -}}
metadata:
  labels:
    {{- include "segue.labels" (dict "root" .root "component" .role) | nindent 4 }}
  {{- with .pool.podAnnotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  serviceAccountName: {{ include "segue.serviceAccountName" .root }}
  automountServiceAccountToken: false
  {{- include "segue.imagePullSecrets" .root | nindent 2 }}
  securityContext:
    {{- include "segue.podSecurity" . | nindent 4 }}
  terminationGracePeriodSeconds: 60
  containers:
    - name: ray-worker
      {{- include "segue.rayContainer" (dict "root" .root "resources" .root.Values.ray.node.resources) | nindent 6 }}
    - name: instance
      {{- include "segue.instanceContainer" . | nindent 6 }}
  volumes:
    - name: tmp
      emptyDir: {}
    - name: instance-tmp
      emptyDir: {}
    - name: shm
      emptyDir:
        medium: Memory
        sizeLimit: {{ .pool.shmSizeMi }}Mi
    {{- with .root.Values.model.volume }}
    - name: model
      {{- toYaml . | nindent 6 }}
    {{- end }}
  {{- include "segue.placement" (dict "place" .pool) | nindent 2 }}
{{- end -}}

{{- define "segue.instanceContainer" -}}
image: {{ include "segue.image" .root | quote }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
securityContext:
  {{- include "segue.containerSecurity" . | nindent 2 }}
command:
  {{- include "segue.command" (dict "module" (ternary "prefill_worker.app" "decode_worker.app" (eq .role "prefill"))) | nindent 2 }}
env:
  {{- include "segue.podFacts" . | nindent 2 }}
  - name: HOME
    value: /tmp
  - name: SEGUE_CONFIG
    value: {{ include "segue.workerConfig" . | quote }}
resources:
  {{- include "segue.instanceResources" . | nindent 2 }}
volumeMounts:
  - name: instance-tmp
    mountPath: /tmp
  - name: shm
    mountPath: /dev/shm
  {{- if .root.Values.model.volume }}
  - name: model
    mountPath: {{ .root.Values.model.mountPath }}
    readOnly: true
  {{- end }}
{{- end -}}

{{/* The pool's resources, with its GPUs as a limit. */}}
{{- define "segue.instanceResources" -}}
{{- $resources := deepCopy .pool.resources -}}
{{- if gt (int .pool.gpus) 0 -}}
{{- $limits := default (dict) $resources.limits -}}
{{- $_ := set $limits .pool.gpuResource (int .pool.gpus) -}}
{{- $_ := set $resources "limits" $limits -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}
