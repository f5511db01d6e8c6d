{{/*
Print the objects of a file of deploy/, with values in place of the examples in it.
root: the chart's context. path: the file below files/. team: the team, for its name and namespace. namespace: of objects that name none.
replace: pairs of texts, old and new. merge: fields that override those of an object, by kind and name. omit: kind and name of an object to leave out.
*/}}
{{- define "tuneline.objects" -}}
{{- $text := required (printf "files/%s is empty" .path) (.root.Files.Get (printf "files/%s" .path)) }}
{{- $images := .root.Values.images }}{{ $site := .root.Values.site }}
{{- $pairs := list }}
{{- with .team }}
{{- /* A marker replaces the namespace while the team's name is substituted, because the namespace may contain team-a. */}}
{{- $pairs = list
  (list "namespace: team-a" "namespace: @namespace@") (list "metadata.name: team-a" "metadata.name: @namespace@")
  (list "namespace=\"team-a\"" "namespace=\"@namespace@\"") (list "resourceNames: [team-a]" "resourceNames: [@namespace@]")
  (list "team-a" .name) (list "@namespace@" .namespace) (list "value: data-repository" (printf "value: %s" $site.dataRepository))
  (list "runAsUser: 1000, runAsGroup: 1000" (printf "runAsUser: %d, runAsGroup: %d" (int64 $site.user) (int64 $site.group))) }}
{{- end }}
{{- $pairs = concat $pairs (list
  (list "tuneline/python-curation" $images.curation) (list "tuneline/python-serving" $images.serving)
  (list "tuneline/python-training:latest" $images.training) (list "tuneline/python-mlflow" $images.mlflow)
  (list "docker.io/library/postgres:17-bookworm" $images.postgresql) (list "192.0.2.0/28" $site.apiServers)
  (list "198.51.100.0/24" $site.network) (list "https://powerscale.example:9021" $site.s3Endpoint)
  (list "s3://mlflow/artifacts" $site.mlflowArtifacts) (list "mlflow.example" $site.mlflowHost)
  (list "models.example" $site.servingHost) (list "ClassName: public" (printf "ClassName: %s" $site.ingressClass))
  (list "cluster-issuer: site" (printf "cluster-issuer: %s" $site.clusterIssuer))
  (list "postgresql.mlflow.svc:5432" $site.postgresql) (list "server: powerscale.example" (printf "server: %s" $site.powerscale))) }}
{{- range concat $pairs (.replace | default list) }}{{ $text = replace (first .) (last .) $text }}{{ end }}
{{- $context := . }}
{{- range regexSplit "(?m)^---$" $text -1 }}
{{- with fromYaml . }}
{{- $key := printf "%s/%s" .kind .metadata.name }}
{{- if ne $key ($context.omit | default "") }}
{{- include "tuneline.print" (dict "root" $context.root "namespace" ($context.namespace | default "") "object" (mergeOverwrite . (get ($context.merge | default dict) $key | default dict))) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{/* Print one object with the labels of the release. A namespaced object that sets no namespace gets `namespace`. Data survives `helm uninstall`. */}}
{{- define "tuneline.print" -}}
{{- $cluster := list "Namespace" "PersistentVolume" "StorageClass" "ClusterRole" "ClusterRoleBinding" "ClusterQueue" "ResourceFlavor"
  "WorkloadPriorityClass" "ClusterTrainingRuntime" "ValidatingAdmissionPolicy" "ValidatingAdmissionPolicyBinding" }}
{{- $metadata := .object.metadata }}
{{- if and .namespace (not (has .object.kind $cluster)) (not $metadata.namespace) }}{{ $_ := set $metadata "namespace" .namespace }}{{ end }}
{{- if eq .object.kind "RoleBinding" }}
{{- range .object.subjects }}{{ if eq .kind "ServiceAccount" }}{{ $_ := set . "namespace" $metadata.namespace }}{{ end }}{{ end }}
{{- end }}
{{- $labels := dict "app.kubernetes.io/managed-by" .root.Release.Service "app.kubernetes.io/instance" .root.Release.Name
  "helm.sh/chart" (printf "%s-%s" .root.Chart.Name .root.Chart.Version) }}
{{- $_ := set $metadata "labels" (merge $labels ($metadata.labels | default dict)) }}
{{- if has .object.kind (list "Namespace" "PersistentVolume" "PersistentVolumeClaim") }}
{{- $_ := set $metadata "annotations" (merge (dict "helm.sh/resource-policy" "keep") ($metadata.annotations | default dict)) }}
{{- end }}
---
{{ toYaml .object }}
{{ end }}
