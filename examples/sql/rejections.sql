-- Which submitted lines were refused, by which rule?
SELECT at, tenant, line, field, reason, excerpt
FROM rejections
ORDER BY at DESC
LIMIT 50;
