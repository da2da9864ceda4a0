/* Environment of processes. */
#ifndef ENVD_ENV_H
#define ENVD_ENV_H

#include <stdbool.h>
#include <jansson.h>

#include "envd.h"
#include "users.h"

#define ENV_DEFAULT_PATH "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

/* True for an object of strings whose names are not empty and hold no '='. */
bool env_valid(const json_t *vars);
/* What every process gets besides its user's: init's variables and E2B_SANDBOX and its kin. New reference. */
json_t *env_shared(const struct envd *envd);
/* NULL-terminated "NAME=value" strings: PATH, HOME, USER, LOGNAME, then env_shared(), then `extra` (may be NULL), each
 * replacing what came before. NULL without memory; ends with env_free(). */
char **env_build(const struct envd *envd, const struct user *user, const json_t *extra);
void env_free(char **env);
const char *env_get(char *const *env, const char *name);

#endif
