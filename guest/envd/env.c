#define _GNU_SOURCE
#include "env.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

bool env_valid(const json_t *vars)
{
	const char *name;
	json_t *value;

	json_object_foreach((json_t *)vars, name, value)
		if (!*name || strchr(name, '=') || !json_is_string(value))
			return false;
	return true;
}

json_t *env_shared(const struct envd *envd)
{
	json_t *vars = envd->env_vars ? json_copy(envd->env_vars) : json_object();

	json_object_set_new(vars, "E2B_SANDBOX", json_string("true"));
	if (envd->sandbox_id)
		json_object_set_new(vars, "E2B_SANDBOX_ID", json_string(envd->sandbox_id));
	if (envd->template_id)
		json_object_set_new(vars, "E2B_TEMPLATE_ID", json_string(envd->template_id));
	return vars;
}

static char **flatten(json_t *vars)
{
	char **env = calloc(json_object_size(vars) + 1, sizeof *env);
	const char *name;
	json_t *value;
	size_t n = 0;

	if (!env)
		return NULL;
	json_object_foreach(vars, name, value) {
		if (asprintf(&env[n], "%s=%s", name, json_string_value(value)) < 0) {
			env[n] = NULL;
			env_free(env);
			return NULL;
		}
		n++;
	}
	return env;
}

char **env_build(const struct envd *envd, const struct user *user, const json_t *extra)
{
	const char *path = getenv("PATH");
	json_t *vars = json_object(), *shared = env_shared(envd);
	char **env;

	json_object_set_new(vars, "PATH", json_string(path && *path ? path : ENV_DEFAULT_PATH));
	json_object_set_new(vars, "HOME", json_string(user->home));
	json_object_set_new(vars, "USER", json_string(user->name));
	json_object_set_new(vars, "LOGNAME", json_string(user->name));
	json_object_update(vars, shared);
	if (extra)
		json_object_update(vars, (json_t *)extra);
	env = flatten(vars);
	json_decref(shared);
	json_decref(vars);
	return env;
}

void env_free(char **env)
{
	char **at;

	for (at = env; at && *at; at++)
		free(*at);
	free(env);
}

const char *env_get(char *const *env, const char *name)
{
	size_t len = strlen(name);

	for (; *env; env++)
		if (strncmp(*env, name, len) == 0 && (*env)[len] == '=')
			return *env + len + 1;
	return NULL;
}
